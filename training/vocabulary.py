# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Logits of a part of the vocabulary: what a training step needs of an output head with very many rows.

Shapes: `n` states, `M` hidden width, `V` vocabulary, `v` drawn tokens, `K` candidates.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from lilicorr_hf.modeling.target_lilicorr import TargetTables, rescale_logits


def candidate_logits(tables: TargetTables, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The target's logits `[n, K]` of some tokens `[n, K]` at post-norm states `[n, M]`, row by row."""
    head = linear_head(tables)
    logits = torch.einsum("nm,nkm->nk", states.to(tables.dtype), head.weight[token_ids])
    return rescale_logits(logits if head.bias is None else logits + head.bias[token_ids], tables.config)


def linear_head(tables: TargetTables) -> nn.Linear:
    """
    Raises:
        `TypeError`: if the target's output head is something else, whose rows cannot be taken apart.
    """
    if not isinstance(tables.output_head, nn.Linear):
        raise TypeError(f"Training needs a target whose output head is linear, got {type(tables.output_head)}.")
    return tables.output_head


@dataclass
class DrawnVocabulary:
    """The tokens that compete in one step.

    Args:
        token_ids (`torch.LongTensor` of shape `[v]`).
        log_weights (`torch.Tensor` of shape `[v]`): how many tokens each stands for, as a logarithm: added to the
            logits, it makes their normaliser an unbiased estimate of that over all tokens.
        index (`torch.LongTensor` of shape `[V]`): place of a token in `token_ids`; -1 where it was not drawn.
    """

    token_ids: torch.Tensor
    log_weights: torch.Tensor
    index: torch.Tensor

    def logits(self, tables: TargetTables, states: torch.Tensor) -> torch.Tensor:
        """Weighted logits `[n, v]` in fp32 of post-norm states `[n, M]`."""
        head = linear_head(tables)
        bias = None if head.bias is None else head.bias[self.token_ids]
        logits = nn.functional.linear(states.to(tables.dtype), head.weight[self.token_ids], bias)
        return rescale_logits(logits, tables.config).float() + self.log_weights


class Vocabulary:
    """Which tokens compete for a slot in training: all, or the frequent ones and a fresh sample of the others.

    A sampled softmax: a step computes `size` logits a slot instead of `V`. The frequent half is always there, a step's
    labels are, and the rest stands, weighted, for every token that is not.

    Args:
        vocab_size (`int`): `V`.
        size (`int`): tokens of a step, labels not counted; `V` or more for the whole vocabulary.
        texts (iterable of lists of `int`): token ids of the training text, to count.
    """

    def __init__(self, vocab_size: int, size: int, texts: Iterable[list[int]]):
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for token_ids in texts:
            counts += torch.bincount(torch.tensor(token_ids, dtype=torch.long), minlength=vocab_size)
        self.size = min(size, vocab_size)
        self.frequent = torch.zeros(vocab_size, dtype=torch.bool)
        self.frequent[counts.argsort(descending=True, stable=True)[: self.size // 2]] = True

    def draw(self, label_ids: torch.Tensor) -> DrawnVocabulary | None:
        """A step's tokens, its labels `[*]` among them, by torch's own random state; `None` for all tokens."""
        vocab_size = len(self.frequent)
        if self.size == vocab_size:
            return None
        device = label_ids.device
        self.frequent = self.frequent.to(device)
        known = self.frequent.scatter(0, label_ids.flatten(), True)
        others = (~known).nonzero().squeeze(-1)
        chosen = others[torch.randperm(len(others), device=device)[: self.size - self.size // 2]]
        token_ids = torch.cat([known.nonzero().squeeze(-1), chosen])
        log_weights = torch.zeros(len(token_ids), device=device)
        if len(chosen):
            log_weights[-len(chosen) :] = math.log(len(others) / len(chosen))
        index = torch.full((vocab_size,), -1, device=device)
        index[token_ids] = torch.arange(len(token_ids), device=device)
        return DrawnVocabulary(token_ids, log_weights, index)
