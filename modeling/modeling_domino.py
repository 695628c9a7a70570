# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Domino (arXiv 2605.29707): a recurrent cell reads the drafted tokens and corrects the drafter's next logits.

Shapes: `b` batch, `P` rows of a block that predict, `V` vocabulary, `M` hidden width, `G` state of the cell.
"""

import torch
from torch import nn

from .configuration_lilicorr import LiLiCorrConfig
from .modeling_sequential import SequentialDraftModel
from .target_lilicorr import TargetTables


class DominoModel(SequentialDraftModel):
    """
    A block drafter with Domino's head.

    With `shift_label` row `i` of the block predicts the token after it, and the anchor's row drafts first; without it,
    its own. Either way a block of `B` rows drafts `B - 1` tokens, and the cell has read the anchor and all drafts
    before the one it corrects. The first `pure_draft_prefix_len` drafts are the drafter's.
    """

    def __init__(self, config: LiLiCorrConfig):
        super().__init__(config)
        width, state, rank = config.hidden_size, config.gru_hidden_dim, config.emb_dim
        self.slot_rows = slice(0, -1) if config.shift_label else slice(1, None)
        self.prefix_gru = nn.GRU(width, state, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, config.vocab_size, bias=False)
        )
        self.post_init()

    def correct(self, slot, logits, hidden, token_ids, tables: TargetTables, state):
        embeds = tables.embed(token_ids).to(hidden.device, self.dtype)
        output, state = self.prefix_gru(embeds, state)
        if slot < self.config.pure_draft_prefix_len:
            return logits, state
        delta = self.embed_proj(torch.cat([hidden, output[:, -1]], dim=-1))
        return logits + delta.to(logits.device, logits.dtype), state

    def corrected_logits(self, logits: torch.Tensor, hidden: torch.Tensor, token_embeds: torch.Tensor) -> torch.Tensor:
        """Logits of all rows at once, given the true tokens, for training.

        Args:
            logits (`torch.Tensor` of shape `[b, P, V]`), hidden (`torch.Tensor` of shape `[b, P, M]`):
                the drafter's, of the rows that predict.
            token_embeds (`torch.Tensor` of shape `[b, P, M]`): the target's embeddings of the token before each of the
                predicted ones; the anchor's first.
        """
        states, _ = self.prefix_gru(token_embeds)
        delta = self.embed_proj(torch.cat([hidden, states], dim=-1))
        rows = torch.arange(logits.shape[1], device=logits.device).unsqueeze(-1)
        return torch.where(rows < self.config.pure_draft_prefix_len, logits, logits + delta)


DominoModel.register_for_auto_class("AutoModel")

__all__ = ["DominoModel"]
