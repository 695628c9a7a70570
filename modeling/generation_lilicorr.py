# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""How a block drafter enters `generate(assistant_model=...)`: candidate generator and its statistics."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import DFlashCache
from transformers.generation import logits_process
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from .cache_lilicorr import CACHE
from .draft_pass_lilicorr import DraftPass
from .lattice_lilicorr import Lattice
from .linears_lilicorr import packed_draft
from .target_lilicorr import TargetTables, block_positions, states_to_return, tapped_states


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .modeling_dflash import DFlashModel, DraftOutput

logger = logging.get_logger(__name__)

# `generate` fills this in when the caller gave no `num_assistant_tokens`.
NUM_ASSISTANT_TOKENS_NOT_GIVEN = 20

# Processors whose output depends on nothing but the prefix and the logits, so that asking them about a draft leaves no
# trace. Only these steer the draft. Any other still decides what the target accepts; warpers are its business alone.
PREFIX_PROCESSORS = (
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)
# They keep state from call to call or run the target themselves: no assistant can be exact with them.
REFUSED_PROCESSORS = (
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


@dataclass
class BlockRecord:
    """One verification: `drafted` tokens proposed, `accepted` of them kept (the bonus token not counted), seconds.

    Of a tree, `drafted` counts all nodes, and the accepted ones are a path in it.

    Args:
        sequence (`int`): its place in the batch, as `generate` returns it.
        anchor_id (`int`): the token the block follows; this and the rest with `record(lattice=True)` only.
        draft_ids (`list[int]`): the `drafted` tokens.
        verified_ids (`list[int]`): what the target kept of them, then its own token: `accepted + 1`.
        lattice ([`Lattice`]): of this block, on the CPU; `None` from a draft method that has none.
        parents (`list[int]`): each drafted token's predecessor in a tree, -1 for the anchor; `None` for chains.
    """

    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float
    sequence: int = 0
    anchor_id: int | None = None
    draft_ids: list[int] | None = None
    verified_ids: list[int] | None = None
    lattice: Lattice | None = None
    parents: list[int] | None = None


@dataclass
class Recording:
    """Statistics of the `generate` calls made inside [`record`].

    Args:
        calls (`int`): `generate` calls, each with one prefill pass of the target.
        passes (`int`): passes of the target after the prefill.
        blocks (`list[BlockRecord]`): one for every sequence a pass verified, so one per pass without a batch.
        lattice (`bool`): whether blocks keep their candidates and scores too.
        on_block (`Callable`): given each block as soon as it is verified; `None` for nobody.
    """

    calls: int = 0
    passes: int = 0
    blocks: list[BlockRecord] = field(default_factory=list)
    lattice: bool = False
    on_block: Callable[[BlockRecord], None] | None = None

    def add(self, block: BlockRecord) -> None:
        self.blocks.append(block)
        if self.on_block is not None:
            self.on_block(block)

    @property
    def accepted(self) -> list[int]:
        """Accepted draft tokens of each block, without the bonus token."""
        return [block.accepted for block in self.blocks]

    @property
    def tau(self) -> float:
        """Acceptance length: tokens gained per verification, bonus included, prefill not counted; NaN without any."""
        return sum(self.accepted) / len(self.blocks) + 1 if self.blocks else float("nan")

    @property
    def target_passes(self) -> int:
        return self.calls + self.passes

    @property
    def draft_seconds(self) -> float:
        return sum(block.draft_seconds for block in self.blocks)

    @property
    def verify_seconds(self) -> float:
        return sum(block.verify_seconds for block in self.blocks)


_recording: ContextVar[Recording | None] = ContextVar("lilicorr_recording", default=None)


@contextmanager
def record(lattice: bool = False, on_block: Callable[[BlockRecord], None] | None = None) -> Iterator[Recording]:
    """Collects statistics of the assisted `generate` calls of this thread (and task) until the block ends.

    Args:
        lattice (`bool`): keep each block's candidates, scores and verified tokens too, copied to the CPU.
        on_block (`Callable`): called with each [`BlockRecord`] as soon as its block is verified, to show it live.

    Example:

    ```python
    >>> with record() as r:
    ...     target.generate(**inputs, assistant_model=assistant)
    >>> r.tau
    ```
    """
    recording = Recording(lattice=lattice, on_block=on_block)
    token = _recording.set(recording)
    try:
        yield recording
    finally:
        _recording.reset(token)


class BlockDrafting:
    """
    All state that drafting for one `generate` call has, whichever loop decodes.

    Args:
        drafter ([`DFlashModel`]): or a model with a head on top.
        target (`PreTrainedModel`): the model that verifies.
        generation_config (`GenerationConfig`): of this call.
        logits_processor (`LogitsProcessorList`): of this call.

    Raises:
        `ValueError`: if the two do not fit, and for processors that no assistant can serve.
    """

    def __init__(
        self,
        drafter: "DFlashModel",
        target: "PreTrainedModel",
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
    ):
        drafter.check_target(target)
        check_processors(logits_processor or ())
        self.drafter = drafter
        self.tables = TargetTables(target)
        self.cache = DFlashCache(config=drafter.config)
        self.draft_pass = DraftPass(drafter, self.tables)
        self.packed = packed_draft(drafter)
        # Context rows that were left out, or have left the window.
        self.skipped = 0
        self.max_length = generation_config.max_length
        self.max_drafted = drafter.num_drafted
        if generation_config.num_assistant_tokens not in (None, NUM_ASSISTANT_TOKENS_NOT_GIVEN):
            self.max_drafted = min(self.max_drafted, generation_config.num_assistant_tokens)
        # The caller's own request for all states cannot be narrowed down to ours.
        wanted = bool(generation_config.output_hidden_states) or states_to_return(drafter.config.target_layer_ids)
        self.model_kwargs_overrides = {"output_hidden_states": wanted}
        self.recording = _recording.get()
        if self.recording is not None:
            self.recording.calls += 1
        self._draft_seconds = self._verify_start = 0.0
        self._draft_output: DraftOutput | None = None

    def draft_block(self, attention_mask: torch.Tensor | None, in_step: bool = True, **inputs) -> "DraftOutput":
        """[`DFlashModel.draft`] with this call's cache; the loop has to [`heed`] whether its scores are finite.

        Args:
            in_step (`bool`): whether all rows take equally many tokens.
        """
        inputs |= {"cache": self.cache, "tables": self.tables, "attention_mask": attention_mask}
        if self.draft_pass.serves(attention_mask, in_step):
            output = self.drafter.draft(draft_pass=self.draft_pass, **inputs)
        else:
            with self.packed:
                output = self.drafter.draft(**inputs)
        if self.recording is not None and self.recording.lattice:
            self._draft_output = output
        return output

    def heed(self, finite: bool) -> None:
        """Makes a draft of scores that are no numbers the call's last."""
        if not finite:
            logger.warning_once(
                f"{type(self.drafter).__name__} {self.drafter.name_or_path!r} computes scores that are not finite, so "
                "its drafts are left out: the text is right, but no faster. Check its weights and dtype."
            )
            self.max_drafted = 0

    def outside_window(self, rows: int) -> int:
        """How many of the oldest context rows, cached ones first, leave the drafter's window for `rows` new ones."""
        window = self.drafter.config.context_window
        return 0 if window is None else max(self.cache.get_seq_length() + rows - window, 0)

    def slide_window(self, context: torch.Tensor) -> torch.Tensor:
        """New context rows `[b, c, L * M]` without those before the drafter's window; the cache gives up its own."""
        excess = self.outside_window(context.shape[1])
        cached = min(excess, self.cache.get_seq_length())
        self.skipped += excess
        layers: list[Any] = self.cache.layers if cached else []
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, cached:], layer.values[:, :, cached:]
        # A copy, so that the rows left out are freed.
        return context[:, excess - cached :].clone() if excess > cached else context

    def record_block(
        self, ids, row: int, drafted: int, accepted: int, verify_seconds: float, rows: int = 1, sequence: int = 0
    ) -> None:
        """Adds the verification of one sequence of `rows` that a pass verified; only while recording.

        Args:
            ids (`torch.LongTensor` of shape `[n]`): all its tokens so far.
            row (`int`): its row in the draft.
            drafted, accepted (`int`): tokens proposed, and kept.
            verify_seconds (`float`): of the pass, shared by its rows as is the time of the draft.
            sequence (`int`): its place in the batch.
        """
        assert self.recording is not None
        block = BlockRecord(drafted, accepted, self._draft_seconds / rows, verify_seconds / rows, sequence)
        if self.recording.lattice:
            block.anchor_id, *block.verified_ids = ids[-accepted - 2 :].tolist()
            block.draft_ids = []
            if (draft := self._draft_output) is not None:
                block.draft_ids = draft.token_ids[row, :drafted].tolist()
                block.parents = None if draft.parents is None else draft.parents[row, :drafted].tolist()
                fields = {} if draft.lattice is None else draft.lattice.items()
                block.lattice = Lattice(**{name: x[row : row + 1].cpu() for name, x in fields}) if fields else None
        self.recording.add(block)

    def _now(self) -> float:
        """Seconds, after pending device work, while recording; otherwise nobody asks and nothing waits."""
        if self.recording is None:
            return 0.0
        if self.drafter.device.type != "cpu":
            torch.accelerator.synchronize(self.drafter.device)
        return time.perf_counter()


class BlockCandidateGenerator(BlockDrafting, CandidateGenerator):
    """
    Drafts for one `generate` call of transformers' assisted decoding loop; see [`stock_loop`].

    It returns no logits. The draft is a deterministic function of the prefix, so the loop samples the target and keeps
    the draft while both agree, which leaves the target's distribution exactly as it is.

    Args:
        drafter, target, generation_config, logits_processor: as in [`BlockDrafting`].
        input_ids (`torch.LongTensor` of shape `[1, n]`): the prompt.
        model_kwargs (`dict`): the target's forward arguments, its cache among them.

    Raises:
        `ValueError`: for a batch, a cache that already holds a prefix, an assistant that drafts trees, or processors
            that no assistant can serve.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: "DFlashModel",
        target: "PreTrainedModel",
        generation_config: GenerationConfig,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **unused,
    ):
        check_stock_call(drafter, input_ids, model_kwargs or {})
        super().__init__(drafter, target, generation_config, logits_processor)
        self.processors = LogitsProcessorList(p for p in logits_processor or () if isinstance(p, PREFIX_PROCESSORS))
        mask = (model_kwargs or {}).get("attention_mask")
        self._padded = mask is not None and not mask.all()
        self._drafted: int | None = None

    def get_candidates(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `[1, n]`): all tokens so far; the last one is the anchor.
            model_kwargs (`dict`): position ids and attention mask over the `n` tokens, if the target takes them.
            model_outputs (`ModelOutput`): of the target's last pass.
            is_first_iteration (`bool`): whether the prompt is still to be read; nothing can be drafted before that.
            n_last_matches (`int`): draft tokens the last pass accepted.

        Returns:
            `input_ids` with the draft appended, and `None` for its logits.
        """
        budget = min(self.max_drafted, self.max_length - input_ids.shape[1] - 1)
        if is_first_iteration or budget <= 0:
            self._drafted = None if is_first_iteration else 0
            self._draft_output = None
            self._draft_seconds, self._verify_start = 0.0, self._now()
            return input_ids, None
        start = self._now()
        rows = None if self.cache.get_seq_length() == 0 else n_last_matches + 1
        draft_ids = self._draft(input_ids, model_kwargs, model_outputs.hidden_states, rows)
        draft_ids = draft_ids[:, : min(budget, self.max_drafted)]
        self._drafted = draft_ids.shape[1]
        self._verify_start = self._now()
        self._draft_seconds = self._verify_start - start
        return torch.cat([input_ids, draft_ids.to(input_ids.device)], dim=-1), None

    def _draft(self, input_ids, model_kwargs, hidden_states, rows: int | None) -> torch.Tensor:
        """The next block, given the target's states of its last pass; only the first `rows` were accepted."""
        context = tapped_states(hidden_states, self.drafter.config.target_layer_ids, rows)
        context = self.slide_window(context)
        output = self.draft_block(
            context_states=context,
            anchor_ids=input_ids[:, -1:],
            position_ids=self._position_ids(model_kwargs, context.shape[1]),
            attention_mask=self._attention_mask(model_kwargs),
            process=functools.partial(self._process, input_ids) if self.processors else None,
        )
        self.heed(output.finite is None or bool(output.finite.all()))
        return output.token_ids

    def _position_ids(self, model_kwargs: dict[str, Any], rows: int) -> torch.Tensor:
        """Positions `[1, rows + B]` of the new context rows and the block; the target's own where it counts them."""
        return block_positions(model_kwargs, rows, self.cache.get_seq_length() + self.skipped, self.drafter)

    def _attention_mask(self, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The target's mask without the anchor, which it has not read, and with the block."""
        if not self._padded:
            return None
        mask = model_kwargs["attention_mask"]
        block = mask.new_ones((mask.shape[0], self.drafter.config.block_size))
        return torch.cat([mask[:, self.skipped : -1], block], dim=-1).to(self.drafter.device)

    def _process(self, input_ids: torch.Tensor, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        prefix = torch.cat([input_ids, drafted.to(input_ids.device)], dim=-1)
        return self.processors(prefix, logits)  # type: ignore[arg-type]

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Called after each verification with the accepted draft tokens; nothing is adapted, only recorded."""
        if self.recording is None or self._drafted is None:
            return
        self.recording.passes += 1
        self.record_block(input_ids[0], 0, self._drafted, int(num_matches), self._now() - self._verify_start)


def check_processors(logits_processor) -> None:
    """Raises `ValueError`, by name, for processors that work against any assistant."""
    for processor in logits_processor:
        if isinstance(processor, REFUSED_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} keeps state from token to token and cannot be checked a block at a time. "
                "Call `generate` without `assistant_model`, or without this processor."
            )


def check_stock_call(drafter: "DFlashModel", input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for a call that transformers' loop would decode differently from plain `generate`, or would
    not draft for as the assistant's config says."""
    if drafter.config.tree_budget:
        raise ValueError(
            f"transformers' assisted loop verifies chains only, and this assistant drafts trees (`tree_budget` is "
            f"{drafter.config.tree_budget}). Set it to 0, or leave the loop to lilicorr_hf."
        )
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"transformers' assisted loop takes one sequence at a time, got a batch of {input_ids.shape[0]}. "
            "`generate(..., custom_generate=lilicorr_hf.block_decoding(assistant))` decodes batches."
        )
    cache = model_kwargs.get(CACHE)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"transformers' assisted loop cannot go on from a cache, and the given one already holds "
            f"{cache.get_seq_length()} positions. Pass an empty one, or "
            "`custom_generate=lilicorr_hf.block_decoding(assistant)`."
        )


__all__ = ["BlockCandidateGenerator", "BlockDrafting", "BlockRecord", "Recording", "record"]
