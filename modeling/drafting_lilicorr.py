# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Drafting for the rows of a batch, which may have taken different numbers of tokens.

Shapes: `b` rows still being decoded, `n` tokens so far, `d` drafted tokens, `V` vocabulary, `c` new context rows, `B`
block size, `L` tapped layers, `M` hidden width.
"""

import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DFlashCache

from .cache_lilicorr import select_columns
from .configuration_lilicorr import check_tree_budget
from .generation_lilicorr import BlockDrafting
from .lanes_lilicorr import Lane
from .pacing_lilicorr import Pace
from .target_lilicorr import block_positions, tapped_states
from .tree_lilicorr import TreeShape


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .modeling_dflash import DFlashModel, DraftOutput


class RowDrafting(BlockDrafting):
    """Drafts for many rows, which may have taken different numbers of tokens.

    The drafter's cache holds the context rows read so far; `context`, of shape `[b, c, L * M]`, are those it reads
    with the next draft. `mask` covers both, `None` while no row has padding.
    """

    def __init__(
        self,
        drafter: "DFlashModel",
        target: "PreTrainedModel",
        config: GenerationConfig,
        processors,
        tree_budget: int = 0,
    ):
        super().__init__(drafter, target, config, processors)
        self.tree_budget = tree_budget
        check_tree_budget(tree_budget, drafter.config.sampled_walk)
        self.context: torch.Tensor
        self.mask: torch.Tensor | None = None
        self.temperature = None
        if config.do_sample and drafter.config.sampled_walk:
            self.temperature = 1.0 if config.temperature is None else config.temperature
        # A drawn draft depends on the seed; how it is cut must not depend on the clock.
        self.pace = Pace() if drafter.config.adaptive_draft and self.temperature is None else None
        # Whether the drafter has still to read `context`.
        self.unread = False
        self.draft_started = self.pass_started = 0.0

    def read(self, outputs: Any, counts: list[int] | None = None, mask: torch.Tensor | None = None) -> None:
        """Takes the target's states of the positions that the next draft follows.

        Args:
            outputs (`ModelOutput`): of the target's last pass.
            counts (`list[int]`): how many of its positions to take for each row; `None` for all.
            mask (`torch.Tensor`): the target's up to the position after them, with passes over the prompt.
        """
        states = tapped_states(outputs.hidden_states, self.drafter.config.target_layer_ids)
        if len(states) > 1:
            # What one row would gain another would pay for.
            self.pace = None
        if mask is not None:
            mask = mask[:, -states.shape[1] - 1 : -1]
            mask = None if mask.all() else mask
        if counts is not None:
            states, most = states[:, : max(counts)], max(counts)
            if min(counts) < most:
                # To the right, where the drafter looks for the state before the anchor.
                columns = torch.arange(most) - (most - torch.tensor(counts).unsqueeze(-1))
                columns = columns.to(states.device)
                mask = (columns >= 0).long()
                states = states.gather(1, columns.clamp(min=0).unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        held = self.cache.get_seq_length() + (self.context.shape[1] if self.unread else 0)
        if mask is not None or self.mask is not None:
            ones = torch.ones(len(states), held + states.shape[1], dtype=torch.long)
            seen = ones[:, :held] if self.mask is None else self.mask
            new = ones[:, seen.shape[1] :] if mask is None else mask
            self.mask = torch.cat([seen.to(self.drafter.device), new.to(self.drafter.device)], dim=-1)
        self.context = torch.cat([self.context, states], dim=1) if self.unread else states
        self.unread = self.max_drafted > 0
        if self.mask is not None:
            self.mask = self.mask[:, self.outside_window(self.context.shape[1]) :]
        self.context = self.slide_window(self.context)

    def draft(
        self, anchor_ids: torch.Tensor, model_kwargs: dict[str, Any], lanes: list[Lane], budget: int, always: bool
    ) -> "DraftOutput | None":
        """A block after each row's last token, or `None` where there is nothing to draft.

        Args:
            anchor_ids (`torch.LongTensor` of shape `[b, 1]`): the last tokens.
            model_kwargs (`dict`): the target's forward arguments up to them.
            lanes (`list[Lane]`): the rows' lanes.
            budget (`int`): tokens of a row that can be used at most.
            always (`bool`): draft even if none can be used.
        """
        start = self._verify_start = self._now()
        self._draft_seconds, self._draft_output = 0.0, None
        pace = None if always else self.pace
        self.draft_started = self.pass_started = time.perf_counter()
        if (budget <= 0 or (pace is not None and not pace.wants_draft())) and not always:
            return None
        block = self.drafter.config.block_size
        mask = self.mask
        output = self.draft_block(
            context_states=self.context,
            anchor_ids=anchor_ids,
            position_ids=block_positions(
                model_kwargs, self.context.shape[1], self.cache.get_seq_length() + self.skipped, self.drafter
            ),
            attention_mask=None if mask is None else torch.cat([mask, mask.new_ones(len(mask), block)], dim=-1),
            process=self.process(lanes),
            in_step=len(lanes) == 1,
            **{} if self.temperature is None else {"temperature": self.temperature},
            **{"tree": TreeShape(self.tree_budget, budget)} if self.tree_budget and budget > 0 else {},
        )
        self.unread = False
        self.close_gaps()
        if pace is not None and (chances := survival(output, budget)) is not None:
            cut(output, pace.length(chances))
        self.pass_started = time.perf_counter()
        self._verify_start = self._now()
        self._draft_seconds = self._verify_start - start
        return output

    def process(self, lanes: list[Lane]):
        """The processors that steer the draft, each lane's for its rows; `None` if there are none."""
        if not any(lane.steering for lane in lanes):
            return None
        sizes = [len(lane.ids) for lane in lanes]

        def process(drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            steps = zip(lanes, drafted.split(sizes), logits.split(sizes), strict=True)
            return torch.cat([lane.steer(ids, scores) for lane, ids, scores in steps])

        return process

    def close_gaps(self) -> None:
        """Moves padding in the cache to the left, and drops columns that are padding in all rows."""
        if self.mask is None or self.mask.all():
            return
        keep = int(self.mask.sum(dim=-1).max())
        columns = self.mask.argsort(dim=-1, stable=True)[:, -keep:]
        self.mask = self.mask.gather(1, columns)
        self.select_cached(torch.arange(len(columns)), columns)

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the given rows, without context that only others had."""
        seen = self.cache.get_seq_length()
        self.context = self.context[rows.to(self.context.device)]
        if self.mask is not None:
            cached, new = self.mask[rows.to(self.mask.device)].tensor_split([seen], dim=-1)
            first = int(new.any(dim=0).int().argmax())
            self.mask = torch.cat([cached, new[:, first:]], dim=-1)
            self.context = self.context[:, first:]
        self.select_cached(rows, torch.arange(seen).expand(len(rows), -1))

    def select_cached(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        for layer in self.cache.layers:
            select_columns(layer, rows, columns)

    def draft_idly(self, anchor_ids: torch.Tensor) -> None:
        """Runs the drafter for the sake of other processes that need this one's shards."""
        config, rows = self.drafter.config, len(anchor_ids)
        self.drafter.draft(
            context_states=self.context[:, -1:],
            anchor_ids=anchor_ids,
            position_ids=torch.arange(config.block_size + 1, device=self.drafter.device).expand(rows, -1),
            cache=DFlashCache(config=config),
            tables=self.tables,
        )

    def record(self, lanes: list[Lane], drafted: int, counts: list[int]) -> None:
        """Adds a pass that verified `drafted` tokens of every row and took `counts[i]` tokens in lane `i`."""
        if self.pace is not None:
            draft_seconds = None if self.unread else self.pass_started - self.draft_started
            self.pace.add(drafted, counts[0], draft_seconds, time.perf_counter() - self.pass_started)
        if self.recording is None:
            return
        self.recording.passes += 1
        seconds = self._now() - self._verify_start
        rows = [
            (ids, count, sequence)
            for lane, count in zip(lanes, counts, strict=True)
            for sequence, ids in enumerate(lane.ids, start=lane.first)
        ]
        for row, (ids, count, sequence) in enumerate(rows):
            self.record_block(ids, row, drafted, count - 1, seconds, len(rows), sequence)


def survival(output: "DraftOutput", budget: int) -> list[float] | None:
    """How probable each drafted token of a sequence is, with all before it on its path; `None` if nobody knows.

    Of a walk to the drafter, up to `budget` tokens, and not by equation 2; [`Pace`] corrects what is off by what the
    target accepts.
    """
    if output.log_probs is not None:
        return output.log_probs[0].exp().tolist()
    if (lattice := output.lattice) is None or lattice.walk is None:
        return None
    walk = lattice.walk[0, :budget]
    log_probs = lattice.log_probs[0, : len(walk)].gather(-1, walk.unsqueeze(-1)).squeeze(-1)
    return log_probs.cumsum(dim=-1).exp().tolist()


def cut(output: "DraftOutput", length: int) -> None:
    """Leaves a draft its first `length` tokens; of a tree they are the best tree of that size."""
    output.token_ids = output.token_ids[:, :length]
    if output.parents is not None:
        output.parents = output.parents[:, :length]
    if output.log_probs is not None:
        output.log_probs = output.log_probs[:, :length]


__all__ = ["RowDrafting"]
