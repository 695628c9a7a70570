# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Trees of drafted tokens: which prefixes of a block the target is shown.

A block has more likely continuations than one, and one pass of the target can look at many, see [`DraftTree`]. DDTree
(arXiv 2604.12989) shows it the prefixes that are most probable if slots were independent. LiLiCorr-Tree asks the head
instead, which has scored every pair of neighbours anyway.

Shapes: `b` rows, `S` slots of a block and `s <= S` a tree may use, `P` candidates of a slot, of which the head scored
the first `K`, `n` nodes of a tree, `V` vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .lattice_lilicorr import Lattice, candidate_pool, processed_slots


class TreeShape(NamedTuple):
    """How large a tree may get: `nodes` in all, `depth` tokens on any path."""

    nodes: int
    depth: int


class BestFirstTree(NamedTuple):
    """A tree whose tokens stand by descending probability, so that its first ones are the best tree of their number.

    Args:
        token_ids, parents (`torch.LongTensor` of shape `[b, n]`): as in [`DraftOutput`].
        log_probs (`torch.Tensor` of shape `[b, n]`): of each token with all before it on its path.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    log_probs: torch.Tensor


def best_first_tree(candidate_ids: torch.Tensor, log_probs: torch.Tensor, nodes: int) -> BestFirstTree:
    """The `nodes` most probable prefixes of a block. They are a tree, as no prefix is less probable than a longer one,
    and of all trees of that size the one with the greatest expected acceptance length (DDTree, section 3), also where
    a slot depends on the one before.

    A heap finds them one by one; this takes the best of each length, then the best of all, so that rows grow together
    and nothing leaves the device.

    Args:
        candidate_ids (`torch.LongTensor` of shape `[b, s, P]`).
        log_probs (`torch.Tensor` of shape `[b, s, P, P]`): of candidate `j` of a slot after candidate `i` of the one
            before, at `[..., i, j]`; the first slot comes after the anchor, whatever `i`. None is above 0.

    Returns:
        [`BestFirstTree`], with less than `nodes` tokens only where there are not as many prefixes.
    """
    rows, _, width = candidate_ids.shape
    # The anchor, from which all prefixes grow.
    scores, index = log_probs.new_zeros(rows, 1), candidate_ids.new_zeros(rows, 1)
    levels, before = [(scores, index, index)], 0
    for ids, after in zip(candidate_ids.unbind(1), log_probs.unbind(1), strict=True):
        prefixes = scores.unsqueeze(-1) + after.gather(1, index.unsqueeze(-1).expand(-1, -1, width))
        scores, place = prefixes.flatten(1).topk(min(nodes, prefixes[0].numel()), dim=-1)
        parents, before = before + place // width, before + index.shape[1]
        index = place % width
        levels.append((scores, ids.gather(-1, index), parents))
    scores, token_ids, parents = (torch.cat(parts, dim=-1) for parts in zip(*levels, strict=True))
    # Stable: of equals the shorter prefix comes first, so that no node is there without its parent.
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    rank, order = order.argsort(dim=-1), order[:, 1 : nodes + 1]
    parents = rank.gather(-1, parents.gather(-1, order)) - 1
    return BestFirstTree(token_ids.gather(-1, order), parents, scores[:, 1 : nodes + 1])


def marginal_tree(logits: torch.Tensor, nodes: int) -> BestFirstTree:
    """DDTree: [`best_first_tree`] of slots that do not know of each other.

    Args:
        logits (`torch.Tensor` of shape `[b, s, V]`): the drafter's, maybe processed.
    """
    candidate_ids, log_probs = candidate_pool(logits, min(nodes, logits.shape[-1]))
    return best_first_tree(candidate_ids, given_anything(log_probs), nodes)


def lattice_tree(lattice: Lattice, logits: torch.Tensor | None, nodes: int, weight: float) -> BestFirstTree:
    """LiLiCorr-Tree: [`best_first_tree`] under the head's scores; tokens it did not score keep the drafter's.

    Args:
        lattice ([`Lattice`]): of `b` sequences.
        logits (`torch.Tensor` of shape `[b, s, V]`): the drafter's, maybe processed; `None` if the lattice's own
            candidates are enough.
        weight (`float`): of the drafter beside the head, see [`conditional_log_probs`].
    """
    candidate_ids, log_probs = lattice.candidate_ids, lattice.log_probs
    if logits is not None:
        candidate_ids, log_probs = widened_pool(candidate_ids[:, : logits.shape[1]], logits, nodes)
    return best_first_tree(candidate_ids, conditional_log_probs(lattice, log_probs, weight), nodes)


def steered_slots(logits: torch.Tensor, shape: TreeShape, process: Callable[..., torch.Tensor] | None) -> torch.Tensor:
    """Logits `[b, s, V]` of the slots a tree may use, out of `[b, S, V]`, under logits processors if there are any."""
    logits = logits[:, : shape.depth]
    return logits if process is None else processed_slots(logits, process)


def given_anything(log_probs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[b, s, P]` as those after any candidate, a view of shape `[b, s, P, P]`."""
    return log_probs.unsqueeze(2).expand(-1, -1, log_probs.shape[-1], -1)


def widened_pool(candidate_ids: torch.Tensor, logits: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The given candidates `[b, s, K]` and after them the best of the others, `P = max(K, size)` of each slot if there
    are as many; ids and log-probabilities over the whole vocabulary, both `[b, s, P]`."""
    logits = logits.float()
    missing = min(size, logits.shape[-1]) - candidate_ids.shape[-1]
    others = logits.scatter(-1, candidate_ids, -torch.inf).topk(max(missing, 0), dim=-1)
    known = torch.cat([logits.gather(-1, candidate_ids), others.values], dim=-1)
    return torch.cat([candidate_ids, others.indices], dim=-1), known - logits.logsumexp(dim=-1, keepdim=True)


def conditional_log_probs(lattice: Lattice, log_probs: torch.Tensor, weight: float) -> torch.Tensor:
    """Log-probabilities of candidates after each candidate of the slot before.

    The drafter says how probable it is that one of the `K` scored candidates is right, and the softmax over them of
    `(1 - weight) * score + weight * log p` which. At 1 that leaves the drafter's own probabilities, at 0 the head
    alone chooses.

    Args:
        lattice ([`Lattice`]): with `K` candidates.
        log_probs (`torch.Tensor` of shape `[b, s, P]`): the drafter's, the lattice's candidates first; -inf for what
            processors forbid.
        weight (`float`): in [0, 1].

    Returns:
        `[b, s, P, P]`, as [`best_first_tree`] takes it.
    """
    slots, k = log_probs.shape[1], lattice.candidate_ids.shape[-1]
    start = lattice.start_scores[:, None, None].expand(-1, 1, k, -1)
    scores = torch.cat([start, lattice.pair_scores], dim=1)[:, :slots]
    drafter, known = lattice.log_probs[:, :slots, None], log_probs[:, :, None, :k]
    # What processors did to a candidate they do to its score; what they did to all of a slot, the softmax forgets.
    mixed = (1 - weight) * scores + weight * drafter + (known - drafter)
    # Rounding can lift a sum of probabilities above 1, and a child before its parent.
    shares = (mixed.log_softmax(dim=-1) + known.logsumexp(dim=-1, keepdim=True)).clamp(max=0)
    result = given_anything(log_probs).clone()
    # No number where all are forbidden.
    result[:, :, :k, :k] = shares.masked_fill(shares.isnan(), -torch.inf)
    # Nobody stands before the first slot whom the head did not score.
    result[:, :1] = result[:, :1, :1]
    return result


__all__ = [
    "BestFirstTree",
    "TreeShape",
    "best_first_tree",
    "conditional_log_probs",
    "lattice_tree",
    "marginal_tree",
    "steered_slots",
    "widened_pool",
]
