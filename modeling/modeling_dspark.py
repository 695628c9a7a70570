# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""DSpark (arXiv 2607.05147): a low-rank Markov head corrects each slot's logits for the token before it.

Shapes: `*` any leading dimensions, `B` block size, `V` vocabulary, `M` hidden width, `r` rank of the head.
"""

import torch
from torch import nn

from .configuration_lilicorr import LiLiCorrConfig
from .modeling_sequential import SequentialDraftModel


# Modules of the head in published checkpoints -> ours, which are named as in nvidia-modelopt.
PUBLISHED_MODULES = {
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "markov_head.gate_proj": "gate_proj",
    "markov_head.joint_proj": "joint_proj",
    "confidence_head.proj": "confidence_proj",
}
# Published with the drafter, too: frozen copies of the target's.
TARGET_MODULES = ("embed_tokens", "lm_head")


class DSparkModel(SequentialDraftModel):
    """
    A block drafter with DSpark's head. The anchor's row predicts, too: a block of `B` rows drafts `B` tokens.

    Three variants: `vanilla`, where the token before alone decides; `gated`, where the slot's state gates it; `rnn`,
    with a state that has read all tokens of the block so far.
    """

    slot_rows = slice(None)
    _keys_to_ignore_on_load_unexpected = [rf"^(model\.)?({'|'.join(TARGET_MODULES)})\."]

    def __init__(self, config: LiLiCorrConfig):
        super().__init__(config)
        width, rank = config.hidden_size, config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        self.confidence_proj = nn.Linear(width + rank, 1)
        if config.markov_head_type == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif config.markov_head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As [`DFlashModel.from_pretrained`], of checkpoints as published (`Qwen3DSparkModel`) too."""
        kwargs.setdefault("key_mapping", PUBLISHED_MODULES)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # Else it would be saved under the names it was read from.
        model._weight_conversions = []
        return loaded

    @property
    def num_drafted(self) -> int:
        return self.config.block_size

    def correct(self, slot, logits, hidden, token_ids, tables, state):
        embeds = self.markov_w1(token_ids[:, 0].to(hidden.device))
        code, state = self.code(hidden, embeds, state)
        return logits + self.markov_w2(code).to(logits.device, logits.dtype), state

    def code(
        self, hidden: torch.Tensor, embeds: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the head says of a slot, `[*, r]`, and the state it leaves behind.

        Args:
            hidden (`torch.Tensor` of shape `[*, M]`): the drafter's state of the slot.
            embeds (`torch.Tensor` of shape `[*, r]`): of the token before it.
            state (`torch.Tensor` of shape `[*, r]`): of the `rnn` variant; `None` at the start of a block.
        """
        kind = self.config.markov_head_type
        if kind == "vanilla":
            return embeds, None
        if kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embeds], dim=-1))) * embeds, None
        state = torch.zeros_like(embeds) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, embeds, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def corrected_logits(
        self, logits: torch.Tensor, hidden: torch.Tensor, previous_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all rows at once, given the true tokens, and the logits of their acceptance, for training.

        Args:
            logits (`torch.Tensor` of shape `[*, B, V]`), hidden (`torch.Tensor` of shape `[*, B, M]`): the drafter's.
            previous_ids (`torch.LongTensor` of shape `[*, B]`): the token before each of the predicted ones.

        Returns:
            corrected logits `[*, B, V]` and confidence logits `[*, B]`.
        """
        embeds = self.markov_w1(previous_ids)
        codes, state = [], None
        for states, before in zip(hidden.unbind(dim=-2), embeds.unbind(dim=-2), strict=True):
            code, state = self.code(states, before, state)
            codes.append(code)
        confidence = self.confidence_proj(torch.cat([hidden, embeds], dim=-1)).squeeze(-1)
        return logits + self.markov_w2(torch.stack(codes, dim=-2)), confidence


def confident_prefix(confidence: torch.Tensor, threshold: float) -> torch.Tensor:
    """Drafts `[*]` before the first one whose acceptance, by its logit `[*, B]`, is less probable than `threshold`."""
    return (confidence.sigmoid() >= threshold).long().cumprod(dim=-1).sum(dim=-1)


DSparkModel.register_for_auto_class("AutoModel")

__all__ = ["DSparkModel", "confident_prefix"]
