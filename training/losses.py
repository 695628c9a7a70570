# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The terms of the training loss as pure functions.

Shapes: `*` leading dimensions (rows, blocks), `S` slots of a block, `K` candidates of a slot. Slots count from 0.
Equation numbers are those of the LiLiCorr paper (arXiv 2608.20530).
"""

import torch
from torch.nn import functional as F

from lilicorr_hf.modeling.lattice_lilicorr import conditional_scores


class TokenLogProbs(torch.autograd.Function):
    """Log-probabilities in fp32 of some tokens, with one pass over the vocabulary in the backward direction.

    Autograd would keep the logits in fp32 and go over them for every gather and every term of the normaliser.
    """

    @staticmethod
    def forward(ctx, logits, ids):
        ctx.save_for_backward(logits, ids)
        return logits.log_softmax(dim=-1, dtype=torch.float32).gather(-1, ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        logits, ids = ctx.saved_tensors
        total = gradient.sum(dim=-1, keepdim=True)
        result = logits.softmax(dim=-1, dtype=torch.float32).mul_(-total).scatter_add_(-1, ids, gradient)
        return result.to(logits.dtype), None


def token_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[n, m]` in fp32, over the whole vocabulary, of tokens `ids [n, m]` under `logits [n, V]`."""
    return TokenLogProbs.apply(logits, ids)


def decay_weights(num_slots: int, beta: float, device: torch.device | None = None) -> torch.Tensor:
    """DFlash's weights `[S]` of a block's slots, `exp(-s / beta)`: early slots decide how far a draft gets."""
    return torch.exp(-torch.arange(num_slots, device=device) / beta)


def dpace_weights(cross_entropy: torch.Tensor, mask: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """Acceptance-aware weights `[*, S]` of D-PACE (arXiv 2605.18810), detached.

    A slot weighs as much as the drafts that pass through it: the sum over later slots, itself included, of the running
    product of smoothed hit probabilities.

    Args:
        cross_entropy (`torch.Tensor` of shape `[*, S]`): of the ground truth.
        mask (`torch.Tensor` of shape `[*, S]`): 1 at supervised slots; the others count as certain in the product and
            not at all in the sum. Weights there mean nothing.
        alpha (`float`): smoothing; 1 makes every hit certain.
    """
    hit = alpha + (1 - alpha) * torch.exp(-cross_entropy.detach())
    mask = mask.to(hit.dtype)
    reach = torch.where(mask > 0, hit, 1.0).cumprod(dim=-1) * mask
    return reach.flip(-1).cumsum(dim=-1).flip(-1)


def block_loss(cross_entropy: torch.Tensor, weights: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """Weighted mean of the drafter's cross-entropies over a whole batch, 0 where hardly anything is supervised.

    Args:
        cross_entropy (`torch.Tensor` of shape `[*, S]`).
        weights (`torch.Tensor` of shape `[*, S]`): 0 at slots that are not supervised.
        total (`torch.Tensor` of shape `[]`): sum of the weights of the whole batch, if this is a part of it.
    """
    total = weights.sum() if total is None else total
    mean = (weights * cross_entropy).sum() / (total + 1e-6)
    return torch.where(total > 1, mean, mean * 0.0)


def oracle_prefix(truth_index: torch.Tensor, complete: torch.Tensor) -> torch.Tensor:
    """Slots `[*, S]` that teach the head: the leading run of slots whose ground truth is among the candidates.

    Args:
        truth_index (`torch.Tensor` of shape `[*, S]`): the ground truth's candidate index, -1 where it is none.
        complete (`torch.Tensor` of shape `[*]`): blocks with every slot supervised; others teach nothing.
    """
    return ((truth_index >= 0).cumprod(dim=-1) > 0) & complete.unsqueeze(-1)


def node_scores(start_scores: torch.Tensor, pair_scores: torch.Tensor, truth_index: torch.Tensor) -> torch.Tensor:
    """Equation 2 with the ground truth as predecessor: scores `z` of each slot's candidates, `[*, S, K]`.

    Args:
        start_scores (`torch.Tensor` of shape `[*, K]`).
        pair_scores (`torch.Tensor` of shape `[*, S - 1, K, K]`).
        truth_index (`torch.Tensor` of shape `[*, S]`): -1 where there is none; rows that follow one mean nothing.
    """
    rows = conditional_scores(pair_scores, truth_index[..., :-1].clamp(min=0))
    return torch.cat([start_scores.unsqueeze(-2), rows], dim=-2)


def slot_cross_entropy(scores: torch.Tensor, truth_index: torch.Tensor) -> torch.Tensor:
    """Equation 3 of each slot, `[*, S]`: `-log P(truth | true predecessor)` over the `K` candidates."""
    return -scores.log_softmax(dim=-1).gather(-1, truth_index.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def distractor_penalty(scores: torch.Tensor, target_logits: torch.Tensor, truth_index: torch.Tensor) -> torch.Tensor:
    """Equation 4 of each slot, `[*, S]`: how far below the truth the target ranks what the head would choose.

    Args:
        scores (`torch.Tensor` of shape `[*, S, K]`): from [`node_scores`].
        target_logits (`torch.Tensor` of shape `[*, S, K]`): the target's for the candidates; their normaliser cancels.
        truth_index (`torch.Tensor` of shape `[*, S]`).
    """
    truth = target_logits.gather(-1, truth_index.clamp(min=0).unsqueeze(-1))
    return (scores.softmax(dim=-1) * F.relu(truth - target_logits)).sum(dim=-1)


def decision_gap(scores: torch.Tensor, truth_index: torch.Tensor) -> torch.Tensor:
    """The truth's lead over its best competitor, `[*, S]`; infinite where there is no other candidate."""
    truth = truth_index.clamp(min=0).unsqueeze(-1)
    others = scores.scatter(-1, truth, -torch.inf).amax(dim=-1)
    return scores.gather(-1, truth).squeeze(-1) - others


def margin_hinge(scores: torch.Tensor, truth_index: torch.Tensor, margin: float) -> torch.Tensor:
    """The paper's hinge (appendix G) of each slot, `[*, S]`: what the truth's lead lacks to `margin`."""
    return F.relu(margin - decision_gap(scores, truth_index))


def prefix_length(hit: torch.Tensor) -> torch.Tensor:
    """Length `[*]` of the leading run of `hit [*, S]`: drafted tokens the target would accept."""
    return hit.cumprod(dim=-1).sum(dim=-1)


def pair_interaction(pair_scores: torch.Tensor) -> torch.Tensor:
    """What scores `[*, S - 1, K, K]` say about pairs, `[*]`: their standard deviation beyond what each of the two
    candidates gets whatever stands beside it, averaged over slots."""
    rows, columns = pair_scores.mean(dim=-1, keepdim=True), pair_scores.mean(dim=-2, keepdim=True)
    both = pair_scores.mean(dim=(-2, -1), keepdim=True)
    return (pair_scores - rows - columns + both).std(dim=(-2, -1)).mean(dim=-1)
