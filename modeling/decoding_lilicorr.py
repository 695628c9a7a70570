# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The decoding loop of block drafters: every token is decided as plain `generate` decides it, many per target pass.

Rows of a batch are decoded in lanes. One lane with all rows, which advance in step, calls whatever looks at tokens as
plain decoding calls it and is always right. Where all that looks at tokens is known to look at rows one by one, each
row gets a lane of its own: it advances as far as its own draft reaches, and leaves when it is done.

Shapes: `b` rows still being decoded, `n` tokens so far, `d` drafted tokens, `V` vocabulary.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .cache_lilicorr import CACHE, check_cache, columns_left, rows_can_be_moved, select_columns, stop_recording_past
from .drafting_lilicorr import RowDrafting
from .generation_lilicorr import PREFIX_PROCESSORS
from .lanes_lilicorr import Lane, Returned, leap, row_processors
from .linears_lilicorr import FEWEST_ROWS, packed_linears
from .tree_pass_lilicorr import (
    DraftTree,
    check_tree_target,
    default_tree_budget,
    keep_path,
    move_to_front,
    tree_inputs,
    why_no_mask,
)


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .modeling_dflash import DFlashModel

# What may be asked about the rows of a batch one by one: transformers' own, whose answer depends on nothing else.
ROW_PROCESSORS = {
    *PREFIX_PROCESSORS,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
}
ROW_CRITERIA = {
    stopping.EosTokenCriteria,
    stopping.MaxLengthCriteria,
    stopping.MaxTimeCriteria,
    stopping.StopStringCriteria,
}
# The target's forward arguments that moving the rows of a batch knows how to move.
ROW_ARGUMENTS = {CACHE, "attention_mask", "logits_to_keep", "position_ids", "use_cache"}


class BlockDecoder:
    """
    Decodes one `generate` call of a target with a block drafter.

    Args:
        drafter ([`DFlashModel`]): or a model with a head on top.
        target (`PreTrainedModel`): the model whose text it is.
        input_ids (`torch.LongTensor` of shape `[b, n]`): the prompts, left-padded; `n` is 0 for `inputs_embeds` alone.
        logits_processor, stopping_criteria, generation_config, synced_gpus, streamer: as `generate` hands them on.
        tree_budget (`int`): tokens of the trees to draft, 0 for chains; `None` for what the drafter's config says.
        model_kwargs: the target's forward arguments, its cache among them.

    Raises:
        `ValueError`: before any compute, if drafter and target do not fit, for a cache that cannot take back what the
            target rejects, for processors that no assistant can serve, and for trees that the target cannot verify.
    """

    def __init__(
        self,
        drafter: "DFlashModel",
        target: "PreTrainedModel",
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: stopping.StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        tree_budget: int | None = None,
        **model_kwargs,
    ):
        check_cache(model_kwargs.get(CACHE), before_prefill=True)
        self.target: Any = target
        self.config = generation_config
        self.synced_gpus = synced_gpus
        self.streamer = streamer
        self.kwargs = model_kwargs
        self.cache: Cache = model_kwargs[CACHE]
        asked = drafter.config.tree_budget if tree_budget is None else tree_budget
        self.wants_trees = bool(asked)
        budget = default_tree_budget(drafter, target, model_kwargs) if asked is None else asked
        self.drafting = RowDrafting(drafter, target, generation_config, logits_processor, budget)
        if self.wants_trees:
            check_tree_target(drafter, target, model_kwargs)
        self.packed = packed_linears(target, drafter.packed_weights)
        self.returned = Returned(generation_config)
        self.by_row = len(input_ids) > 1 and self.rows_are_independent(logits_processor, stopping_criteria)
        if self.by_row:
            self.all_lanes = [
                Lane(ids, row_processors(logits_processor, i), stopping_criteria, generation_config, first=i)
                for i, ids in enumerate(input_ids.split(1))
            ]
            self.give_rows_their_arguments(input_ids)
        else:
            lane = Lane(input_ids, logits_processor, stopping_criteria, generation_config, streamer, self.returned)
            self.all_lanes = [lane]
        self.leaps = all(lane.leaps for lane in self.all_lanes)
        # Those not done yet.
        self.lanes = self.all_lanes

    def rows_are_independent(self, processors: LogitsProcessorList, criteria: list) -> bool:
        """Whether rows may advance one by one and nobody can tell."""
        kinds = {type(criterion) for criterion in criteria}
        # Without an end token plain decoding goes on with rows that are finished until all are.
        allowed = ROW_CRITERIA if stopping.EosTokenCriteria in kinds else {stopping.MaxLengthCriteria}
        positions = self.kwargs.get("position_ids")
        prepare = getattr(self.target.prepare_inputs_for_generation, "__func__", None)
        return (
            kinds <= allowed
            and {type(processor) for processor in processors} <= ROW_PROCESSORS
            # These hear of all rows at once, step by step.
            and not (self.synced_gpus or self.streamer is not None or self.config.return_dict_in_generate)
            and {name for name, value in self.kwargs.items() if value is not None} <= ROW_ARGUMENTS
            and "attention_mask" in self.kwargs
            and (positions is None or positions.ndim == 2)
            # A target's own preparation of inputs may count on equal lengths.
            and prepare is GenerationMixin.prepare_inputs_for_generation
            and rows_can_be_moved(self.cache)
        )

    def give_rows_their_arguments(self, input_ids: torch.Tensor) -> None:
        """Masks and positions of each row, which will part."""
        if self.kwargs["attention_mask"] is None:
            self.kwargs["attention_mask"] = torch.ones_like(input_ids)
        if (positions := self.kwargs.get("position_ids")) is not None:
            self.kwargs["position_ids"] = positions.expand(len(input_ids), -1)

    def decode(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Reads the prompts, then drafts and verifies until every row is done.

        Returns:
            what `generate` returns: ids `[b, n]`, or a `GenerateDecoderOnlyOutput`.
        """
        try:
            self.prefill()
            device = self.all_lanes[0].ids.device
            with self.target._optimize_model_for_decode():
                while self.target._has_unfinished_sequences(not self.lanes, self.synced_gpus, device=device):
                    if self.lanes:
                        self.decode_block()
                    else:
                        self.keep_others_company()
        finally:
            # It may be the caller's, also after an exception in a callback.
            stop_recording_past(self.cache)
        if self.streamer is not None:
            self.streamer.end()
        return self.result()

    def prefill(self) -> None:
        """Reads what the cache does not hold of the prompts, and takes the first token of every row."""
        ids = torch.cat([lane.ids for lane in self.lanes])
        with self.packed:
            outputs = self.read_prompt(ids)
        self.cache = outputs[CACHE]
        check_cache(self.cache, before_prefill=False)
        # Not before: while a layer with a window records, the whole prompt would stay in it.
        self.cache.activate_past_recording()
        # Counted from here on, as a cache of fixed size tells its length by a tensor in every layer.
        self.room = columns_left(self.cache)
        self.kwargs = self.target._update_model_kwargs_for_generation(outputs, self.kwargs)
        # Compiled where plain decoding would be; the prompt's pass never is.
        compiled = self.target._valid_auto_compile_criteria(self.kwargs, self.config)
        self.forward = self.target.get_compiled_call(self.config.compile_config) if compiled else self.target
        self.returned.add_prefill(outputs)
        self.drafting.read(outputs, mask=self.kwargs.get("attention_mask"))
        self.take(outputs.logits[:, -1:], ids[:, :0])
        if self.drafting.tree_budget:
            reason = why_no_mask(self.cache, self.block_inputs(ids[:, :0]).get("attention_mask"))
            if reason is not None:
                if self.wants_trees:
                    raise ValueError(reason)
                self.drafting.tree_budget = 0
        self.retire()

    def read_prompt(self, ids: torch.Tensor) -> Any:
        """The target's pass over the prompts `[b, n]`, the last one if it reads them in chunks.

        Its own loop over chunks would keep the states of the last one alone from the drafter.
        """
        given = {name for name, value in self.kwargs.items() if value is not None}
        mask, config = self.kwargs.get("attention_mask"), copy.copy(self.config)
        length = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
        if config.prefill_chunk_size is None or not given <= ROW_ARGUMENTS or length != ids.shape[1]:
            return self.target._prefill(ids, self.config, self.kwargs | self.drafting.model_kwargs_overrides)
        chunk, config.prefill_chunk_size = config.prefill_chunk_size, None
        start = self.cache.get_seq_length()
        for end in [*range(start + chunk, length, chunk), length]:
            sliced = {name: self.kwargs[name][..., :end] for name in given & {"attention_mask", "position_ids"}}
            # Where there is no mask, this says that the ids start at the first position.
            config._mask_length = end
            outputs = self.target._prefill(
                ids[:, :end], config, self.kwargs | sliced | self.drafting.model_kwargs_overrides
            )
            if end < length:
                self.drafting.read(outputs, mask=None if mask is None else mask[:, : end + 1])
        return outputs

    def lane_sizes(self) -> list[int]:
        return [len(lane.ids) for lane in self.lanes]

    def decode_block(self) -> None:
        """Draft, one pass of the target, and as many tokens as it agrees with and one more."""
        draft_ids, parents, proposal_logits, finite = self.draft()
        drafted, sizes = draft_ids.shape[1], self.lane_sizes()
        before = [lane.length for lane in self.lanes]
        outputs = self.verify(draft_ids, parents)
        try:
            self.take(outputs.logits, draft_ids, proposal_logits, parents, finite)
        finally:
            # Also after an exception in a callback: the cache may be the caller's, and holds verified tokens only.
            counts = [lane.length - n for lane, n in zip(self.lanes, before, strict=True)]
            if parents is not None:
                self.straighten(outputs, counts)
            self.settle(drafted, counts)
        self.drafting.record(self.lanes, drafted, counts)
        self.returned.add_block(outputs, max(counts), self.cache)
        if not all(lane.done for lane in self.lanes):
            self.drafting.read(outputs, [n for n, size in zip(counts, sizes, strict=True) for _ in range(size)])
        self.retire()

    def take(
        self,
        logits: torch.Tensor,
        draft_ids: torch.Tensor,
        proposal_logits: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        finite: torch.Tensor | None = None,
    ) -> None:
        """Hands lanes their rows of a pass, and lets them take as many tokens as they agree with and one more."""
        if self.leaps:
            return self.drafting.heed(leap(self.lanes, logits, draft_ids, parents, finite))
        sizes = self.lane_sizes()
        parts = (logits, draft_ids, proposal_logits, parents)
        split = [[None] * len(sizes) if part is None else part.split(sizes) for part in parts]
        for lane, *of_lane in zip(self.lanes, *split, strict=True):
            lane.verify(*of_lane)

    def draft(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Drafted ids `[b, d]`, their parents `[b, d]` in a tree, what they were drawn from, `[b, d, V]`, and whether
        the scores of a row were finite, `[b]`, where nobody has looked yet."""
        anchor_ids = torch.cat([lane.ids[:, -1:] for lane in self.lanes])
        left = self.config.max_length - min(lane.length for lane in self.lanes)
        budget = int(min(left - 1, self.drafting.max_drafted, self.room - 1))
        output = self.drafting.draft(anchor_ids, self.kwargs, self.lanes, budget, always=self.synced_gpus)
        if output is None:
            return anchor_ids[:, :0], None, None, None
        # Chains may be told later; what bad scores make of a tree may be none.
        at_once = not self.leaps or output.parents is not None
        if at_once and output.finite is not None:
            self.drafting.heed(bool(output.finite.all()))
        if budget <= 0 or self.drafting.max_drafted == 0:
            return anchor_ids[:, :0], None, None, None
        draft_ids, parents, proposal = output.token_ids, output.parents, output.proposal_logits
        if parents is not None and parents.shape[1] == 0:
            # Of no node, where processors left nothing to draft or a pace nothing to verify: a chain of no token.
            parents = None
        if parents is None:
            draft_ids, proposal = draft_ids[:, :budget], None if proposal is None else proposal[:, :budget]
        else:
            parents = self.by_lane(lambda lane, part: lane.fill_parents(part, budget), parents)
        draft_ids = self.by_lane(Lane.fill, draft_ids)
        proposal = None if proposal is None else proposal.to(anchor_ids.device)
        return draft_ids, parents, proposal, None if at_once else output.finite

    def by_lane(self, fill: Callable[[Lane, torch.Tensor], torch.Tensor], drafted: torch.Tensor) -> torch.Tensor:
        """What `fill` makes of each lane's rows of `drafted [b, d]`."""
        parts = drafted.to(self.lanes[0].ids.device).split(self.lane_sizes())
        return torch.cat([fill(lane, part) for lane, part in zip(self.lanes, parts, strict=True)])

    def block_inputs(self, draft_ids: torch.Tensor) -> dict[str, Any]:
        """The target's forward arguments for the last token of each row and a chain `[b, d]` after it."""
        drafted = draft_ids.shape[1]
        # Rows of their own differ in length, and no more than the last token of each is read.
        ids = [lane.ids[:, -1:] if self.by_row else lane.ids for lane in self.lanes]
        inputs = self.target.prepare_inputs_for_generation(
            torch.cat([torch.cat(ids), draft_ids], dim=-1),
            next_sequence_length=drafted + 1,
            **more_kwargs(self.target, self.kwargs, drafted),
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = drafted + 1
        return inputs

    def verify(self, draft_ids: torch.Tensor, parents: torch.Tensor | None = None) -> Any:
        """The target's pass over the last token of each row and its draft `[b, d]`, a tree if it has parents."""
        drafted, inputs = draft_ids.shape[1], self.block_inputs(draft_ids)
        if parents is not None:
            inputs = tree_inputs(self.target, inputs, DraftTree(draft_ids, parents))
        left = [self.config.max_length - lane.length - 1 for lane in self.lanes]
        if self.by_row and min(left) < drafted and (positions := inputs.get("position_ids")) is not None:
            # A row near its end is drafted beyond it while others are not; a table of positions may end there.
            last = positions[:, :1] + torch.tensor(left, device=positions.device).unsqueeze(-1)
            inputs["position_ids"] = positions.minimum(last)
        # A compiled pass has the width of a whole block: any other would be compiled, too, for a few passes.
        forward = self.forward if drafted == self.drafting.max_drafted else self.target
        pays = (drafted + 1) * len(draft_ids) >= FEWEST_ROWS and forward is self.target
        with self.packed if pays else nullcontext():
            return forward(**inputs | self.drafting.model_kwargs_overrides, return_dict=True)

    def straighten(self, outputs: Any, counts: list[int]) -> None:
        """Makes of a pass over a tree one over the tokens that were taken, in the cache and in what it returned."""
        path = torch.cat([lane.places(n, max(counts)) for lane, n in zip(self.lanes, counts, strict=True)])
        move_to_front(self.cache, outputs.logits.shape[1], path)
        keep_path(outputs, path)

    def settle(self, drafted: int, counts: list[int]) -> None:
        """Takes from the cache what was rejected, and brings masks and positions up to the tokens that were taken."""
        most = max(counts)
        self.room -= most
        self.kwargs = more_kwargs(self.target, self.kwargs, most)
        if min(counts) == most or not self.by_row:
            self.cache.crop(most - drafted - 1)
            return
        # Rows that took fewer tokens move to the right, so that all end in the same column.
        columns = torch.arange(self.kwargs["attention_mask"].shape[1]) - (most - torch.tensor(counts).unsqueeze(-1))
        self.select(torch.arange(len(counts)), columns)

    def select(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Keeps `columns [b', n']` of `rows [b']` in cache, masks and positions; below 0 they are padding."""
        mask = self.kwargs["attention_mask"]
        rows, columns = rows.to(mask.device), columns.to(mask.device)
        index = columns.clamp(min=0)
        self.kwargs["attention_mask"] = mask[rows].gather(1, index) * (columns >= 0)
        if (positions := self.kwargs.get("position_ids")) is not None:
            self.kwargs["position_ids"] = positions[rows].gather(1, index)
        for layer in self.cache.layers:
            # The last token is not in the cache yet.
            select_columns(layer, rows, index[:, :-1])

    def retire(self) -> None:
        """Lets lanes go that are done, with their rows and the columns that nobody else fills."""
        alive = [i for i, lane in enumerate(self.lanes) if not lane.done]
        if len(alive) == len(self.lanes):
            return
        self.lanes = [self.lanes[i] for i in alive]
        if self.lanes:
            rows, mask = torch.tensor(alive), self.kwargs["attention_mask"]
            first = int(mask[rows.to(mask.device)].any(dim=0).int().argmax())
            self.select(rows, torch.arange(first, mask.shape[1]).expand(len(alive), -1))
            self.drafting.select(rows)

    def keep_others_company(self) -> None:
        """A round for other processes, which need this one's shards of both models; nothing of it is kept."""
        ids = torch.cat([lane.ids[:, -1:] for lane in self.all_lanes])
        self.drafting.draft_idly(ids)
        self.target(input_ids=ids, use_cache=False)

    def result(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        longest = max(lane.length for lane in self.all_lanes)
        ids = torch.cat([lane.padded(longest) for lane in self.all_lanes])
        return self.returned.output(ids, self.cache) if self.config.return_dict_in_generate else ids


def more_kwargs(target: Any, model_kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The target's forward arguments `tokens` tokens later, as plain decoding would update them."""
    model_kwargs = dict(model_kwargs)
    # Types of several new tokens at once would be copied from as many old ones, and not from the last.
    singly = any(name.endswith("token_type_ids") for name in model_kwargs)
    for step in [1] * tokens if singly else [tokens] * (tokens > 0):
        model_kwargs = target._update_model_kwargs_for_generation({}, model_kwargs, num_new_tokens=step)
    return model_kwargs


def block_decoding(assistant: "DFlashModel", streamer: Any = None, tree_budget: int | None = None) -> Callable:
    """Block decoding through the public `custom_generate` of `generate`, where the hook is not wanted.

    Args:
        assistant ([`DFlashModel`]): drafts the blocks.
        streamer (`BaseStreamer`): takes the tokens; `generate` keeps its own from a `custom_generate` function. So it
            does with `tokenizer`: instead of `stop_strings` pass a `StopStringCriteria`.
        tree_budget (`int`): tokens of the trees to draft, 0 for chains; `None` for what the assistant's config says.

    Example:

    ```python
    >>> target.generate(**inputs, custom_generate=block_decoding(assistant))
    ```
    """

    def decode(model, input_ids, **kwargs):
        return assistant.decode_blocks(model, input_ids, streamer=streamer, tree_budget=tree_budget, **kwargs)

    return decode


__all__ = ["BlockDecoder", "block_decoding"]
