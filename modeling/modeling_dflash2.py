# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""DFlash2: the block drafter with convolutions around its sublayers, and a low-rank selector of its candidates.

Shapes: `b` batch, `S` slots, `K` candidates of a slot, `V` vocabulary, `M` hidden width, `r` rank of the selector.
"""

import torch
from torch import nn
from transformers import initialization as init

from .configuration_lilicorr import LiLiCorrConfig
from .lattice_lilicorr import Lattice, candidate_pool
from .modeling_dflash import DFlashOutput
from .modeling_lattice import LatticeDraftModel
from .target_lilicorr import TargetTables


class CandidateSelector(nn.Module):
    """How well a candidate follows the one before it: a product of their codes and of the slot's projected state."""

    def __init__(self, config: LiLiCorrConfig):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, previous_ids: torch.Tensor, candidate_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Transitions `[*, I, K]` from tokens `[*, I]` to candidates `[*, K]`; the slot's state is `[*, M]`."""
        before = self.predecessor_codebook[previous_ids] * self.hidden_projection(hidden).unsqueeze(-2)
        return (before @ self.successor_codebook[candidate_ids].transpose(-1, -2)).float()


class DFlash2Model(LatticeDraftModel):
    """
    A block drafter with DFlash2's selector, and its convolutions where the config has them.

    A candidate's score is its logit plus its transition from the token before it. All pairs are scored at once, so a
    draft is a walk through the same lattice as LiLiCorr's.
    """

    def __init__(self, config: LiLiCorrConfig):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, mean=0.0, std=self.config.initializer_range)
            init.normal_(module.successor_codebook, mean=0.0, std=self.config.initializer_range)

    def score(
        self, logits: torch.Tensor, output: DFlashOutput, anchor_ids: torch.Tensor, tables: TargetTables
    ) -> Lattice:
        ids, log_probs = candidate_pool(logits, self.config.candidate_topk)
        unary = logits.gather(-1, ids).float()
        hidden = output.last_hidden_state[:, self.slot_rows]
        own = hidden.device
        start, pair = self.pair_scores(unary.to(own), ids.to(own), anchor_ids[:, 0].to(own), hidden)
        start, pair = start.to(logits.device), pair.to(logits.device)
        return Lattice(candidate_ids=ids, log_probs=log_probs, start_scores=start, pair_scores=pair)

    def pair_scores(
        self, unary: torch.Tensor, candidate_ids: torch.Tensor, anchor_ids: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Start scores `[*, K]` and pair scores `[*, S - 1, K, K]`.

        Args:
            unary (`torch.Tensor` of shape `[*, S, K]`): the drafter's logits of the candidates.
            candidate_ids (`torch.LongTensor` of shape `[*, S, K]`).
            anchor_ids (`torch.LongTensor` of shape `[*]`).
            hidden (`torch.Tensor` of shape `[*, S, M]`): the drafter's states of the slots.
        """
        first, later = candidate_ids[..., 0, :], candidate_ids[..., 1:, :]
        start = self.candidate_selector(anchor_ids.unsqueeze(-1), first, hidden[..., 0, :]).squeeze(-2)
        pair = self.candidate_selector(candidate_ids[..., :-1, :], later, hidden[..., 1:, :])
        return unary[..., 0, :] + start, unary[..., 1:, None, :] + pair


DFlash2Model.register_for_auto_class("AutoModel")

__all__ = ["DFlash2Model"]
