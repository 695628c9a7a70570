# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""What draft methods share that choose a block token by token, each slot's logits corrected for the tokens before it.

Shapes: `b` batch, `B` block size, `n` drafted tokens, `V` vocabulary, `M` hidden width.
"""

from typing import Any

import torch

from .modeling_dflash import DFlashModel, DraftOutput
from .target_lilicorr import TargetTables


class SequentialDraftModel(DFlashModel):
    """A drafter with a head that is asked once for every slot, in order; a method says how in `correct`."""

    has_head = True
    drafts_trees = False
    _keys_to_ignore_on_load_unexpected = []

    def correct(
        self,
        slot: int,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        tables: TargetTables,
        state: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Logits `[b, V]` of one slot given the token before it, and what the next slot needs to know.

        Args:
            slot (`int`): counted from 0.
            logits (`torch.Tensor` of shape `[b, V]`): the drafter's own.
            hidden (`torch.Tensor` of shape `[b, M]`): the drafter's state of the slot.
            token_ids (`torch.LongTensor` of shape `[b, 1]`): the token before it; for slot 0 the anchor.
            tables ([`TargetTables`]): of the target.
            state: what the slot before returned; `None` for slot 0.
        """
        raise NotImplementedError

    def choose(self, logits, output, anchor_ids, tables, process=None, temperature=None) -> DraftOutput:
        """Commits the best token of each corrected slot, one after the other.

        At a temperature it draws them instead, and states what they were drawn from.
        """
        token_ids, state = anchor_ids, None
        drafted, proposal = anchor_ids[:, :0], []
        finite = torch.ones_like(anchor_ids[:, 0], dtype=torch.bool)
        hidden = output.last_hidden_state[:, self.slot_rows]
        for slot, (base, states) in enumerate(zip(logits.unbind(dim=1), hidden.unbind(dim=1), strict=True)):
            scores, state = self.correct(slot, base, states, token_ids, tables, state)
            finite = finite & scores.amax(dim=-1).isfinite()
            if process is not None:
                scores = process(drafted, scores.float())
                if scores.isneginf().all(dim=-1).any():
                    break
            if temperature is None:
                token_ids = scores.argmax(dim=-1, keepdim=True)
            else:
                proposal.append((scores.float() / temperature).log_softmax(dim=-1))
                # Scores of bad weights must not stop a request; the loop sees that they are not finite.
                token_ids = proposal[-1].exp().nan_to_num().clamp(min=1e-30).multinomial(1)
            drafted = torch.cat([drafted, token_ids], dim=-1)
        logits = torch.stack(proposal, dim=1) if proposal else None
        return DraftOutput(token_ids=drafted, proposal_logits=logits, finite=finite)


__all__ = ["SequentialDraftModel"]
