# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The candidate lattice of a block: pool, features, scores, and the paths through it.

Pure functions, named after the terms of the LiLiCorr paper (arXiv 2608.20530). Shapes: `*` any leading dimensions
(batch, blocks), `S` slots of a block (its size minus the anchor), `K` candidates of a slot, `V` vocabulary, `E`
dimension of the in and out vectors. Slots are counted from 0 here, from 1 in the paper, whose slot 0 is the anchor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.utils import ModelOutput

from .kernels_lilicorr import fused_candidate_pool, fused_greedy_walk, fused_viterbi_path, with_kernel


@dataclass
class Lattice(ModelOutput):
    """
    The candidates of a block and how well neighbours fit, all that is needed to draw it or to walk it again.

    Args:
        candidate_ids (`torch.LongTensor` of shape `[*, S, K]`): the pool, by descending drafter probability.
        log_probs (`torch.FloatTensor` of shape `[*, S, K]`): the drafter's, normalised over the whole vocabulary.
        start_scores (`torch.FloatTensor` of shape `[*, K]`): equation 1 from the anchor to each candidate of slot 0.
        pair_scores (`torch.FloatTensor` of shape `[*, S - 1, K, K]`):
            equation 1 from candidate `i` of slot `s` to candidate `j` of slot `s + 1` at `[..., s, i, j]`.
        walk (`torch.LongTensor` of shape `[*, S]`): index of the committed candidate of each slot; `None` before
            the walk, shorter where logits processors ended it.
    """

    candidate_ids: torch.Tensor
    # ModelOutput lets a class have one field without a default; these are never None.
    log_probs: torch.Tensor = None  # type: ignore[assignment]
    start_scores: torch.Tensor = None  # type: ignore[assignment]
    pair_scores: torch.Tensor = None  # type: ignore[assignment]
    walk: torch.Tensor | None = None


@with_kernel(fused_candidate_pool)
def candidate_pool(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` best tokens of each slot, best first, and their log-probabilities over the whole vocabulary in fp32.

    Args:
        logits (`torch.Tensor` of shape `[*, S, V]`).

    Returns:
        ids and log-probabilities, both of shape `[*, S, k]`.
    """
    logits = logits.float()
    top, ids = logits.topk(k, dim=-1)
    return ids, top - logits.logsumexp(dim=-1, keepdim=True)


def candidate_features(log_probs: torch.Tensor) -> torch.Tensor:
    """How confident the drafter is in each candidate (appendix A): five scalars, in fp32.

    Args:
        log_probs (`torch.Tensor` of shape `[*, S, K]`): by descending probability.

    Returns:
        `torch.Tensor` of shape `[*, S, K, 5]`: log p, p, log p minus the slot's best, rank in [0, 1], is best.
    """
    log_probs = log_probs.float()
    k = log_probs.shape[-1]
    rank = torch.arange(k, device=log_probs.device).expand_as(log_probs)
    gap = log_probs - log_probs.amax(dim=-1, keepdim=True)
    return torch.stack([log_probs, log_probs.exp(), gap, rank / max(k - 1, 1), (rank == 0).float()], dim=-1)


def lattice_scores(
    anchor_out: torch.Tensor, out: torch.Tensor, into: torch.Tensor, scale: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 1: scaled cosine of each candidate's out vector with its right neighbours' in vectors, in fp32.

    Args:
        anchor_out (`torch.Tensor` of shape `[*, E]`): out vector of the anchor, not normalised.
        out, into (`torch.Tensor` of shape `[*, S, K, E]`): out and in vectors of the candidates, not normalised.
        scale (`float`): `sigma` of the paper.
        eps (`float`): smallest norm a vector is divided by.

    Returns:
        start scores `[*, K]` and pair scores `[*, S - 1, K, K]`.
    """
    anchor_out, out, into = (F.normalize(x.float(), dim=-1, eps=eps) for x in (anchor_out, out, into))
    # Autocast would round the cosines to bf16, in which scores near 8 are 1/32 apart.
    with torch.autocast(out.device.type, enabled=False):
        start = torch.einsum("...e,...ke->...k", anchor_out, into[..., 0, :, :])
        pair = out[..., :-1, :, :] @ into[..., 1:, :, :].transpose(-1, -2)
    return scale * start, scale * pair


def conditional_scores(pair_scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row `z_s` of equation 2: scores `[*, K]` of a slot's candidates given the committed predecessor `index [*]`.

    Args:
        pair_scores (`torch.Tensor` of shape `[*, K, K]`): from the predecessor's slot to this one.
    """
    row = index[..., None, None].expand(*index.shape, 1, pair_scores.shape[-1])
    return pair_scores.gather(-2, row).squeeze(-2)


@with_kernel(fused_greedy_walk)
def greedy_walk(start_scores: torch.Tensor, pair_scores: torch.Tensor) -> torch.Tensor:
    """Equation 8: each slot takes the candidate that best follows the one before it; ties go to the lower index.

    Args:
        start_scores (`torch.Tensor` of shape `[*, K]`).
        pair_scores (`torch.Tensor` of shape `[*, S - 1, K, K]`).

    Returns:
        `torch.LongTensor` of shape `[*, S]`: candidate index of each slot. No network weights, no host sync.
    """
    walk = [start_scores.argmax(dim=-1)]
    for pair in pair_scores.unbind(dim=-3):
        walk.append(conditional_scores(pair, walk[-1]).argmax(dim=-1))
    return torch.stack(walk, dim=-1)


def processed_slots(logits: torch.Tensor, process: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Logits of slots under logits processors, each slot after the most probable tokens of those before it.

    Args:
        logits (`torch.Tensor` of shape `[b, S, V]`): the drafter's.
        process (`Callable`): from ids drafted so far `[b, s]` and a slot's logits `[b, V]` to processed logits.

    Returns:
        `[b, n, V]` in fp32: they end before a slot that leaves any row nothing to choose.
    """
    drafted = logits.new_empty((logits.shape[0], 0), dtype=torch.long)
    slots = []
    for slot_logits in logits.float().unbind(dim=1):
        processed = process(drafted, slot_logits.clone())
        if processed.isneginf().all(dim=-1).any():
            break
        slots.append(processed)
        drafted = torch.cat([drafted, processed.argmax(dim=-1, keepdim=True)], dim=-1)
    return torch.stack(slots, dim=1) if slots else logits[:, :0].float()


def processed_walk(
    lattice: Lattice,
    logits: torch.Tensor,
    process: Callable[..., torch.Tensor],
    uniforms: torch.Tensor | None = None,
    temperature: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The walk under logits processors: a candidate's score moves by what they do to its logit, so that a penalty
    counts and a forbidden candidate is never taken. It ends before a slot that leaves any row no candidate.

    Args:
        lattice ([`Lattice`]): of `b` sequences.
        logits (`torch.Tensor` of shape `[b, S, V]`): the drafter's.
        process (`Callable`): from ids drafted so far `[b, s]` and a slot's logits `[b, V]` to processed logits.
        uniforms (`torch.Tensor` of shape `[b, S]`), temperature (`float`): as in [`sampled_walk`]; without them the
            walk is greedy.

    Returns:
        candidate indices `[b, n]`, `n <= S`, and the probabilities `[b, n, K]` they were drawn from, if they were.
    """
    walk: list[torch.Tensor] = []
    proposal: list[torch.Tensor] = []
    drafted = lattice.candidate_ids[:, :0, 0]
    for s, candidates in enumerate(lattice.candidate_ids.unbind(dim=-2)):
        scores = conditional_scores(lattice.pair_scores[:, s - 1], walk[-1]) if s else lattice.start_scores
        before = logits[:, s].float()
        shift = process(drafted, before.clone()) - before
        scores = scores + shift.gather(-1, candidates)
        if scores.isneginf().all(dim=-1).any():
            break
        if uniforms is None or temperature is None:
            walk.append(scores.argmax(dim=-1))
        else:
            index, probs = draw_candidate(scores, uniforms[:, s], temperature)
            walk.append(index)
            proposal.append(probs)
        drafted = torch.cat([drafted, candidates.gather(-1, walk[-1].unsqueeze(-1))], dim=-1)
    path = torch.stack(walk, dim=-1) if walk else drafted
    return path, torch.stack(proposal, dim=-2) if proposal else None


@with_kernel(fused_viterbi_path)
def viterbi_path(start_scores: torch.Tensor, pair_scores: torch.Tensor) -> torch.Tensor:
    """The path with the greatest sum of scores, exactly, in O(S K^2); it decodes worse than the walk (appendix E).

    Arguments and result as in [`greedy_walk`].
    """
    best, origins = start_scores, []
    for pair in pair_scores.unbind(dim=-3):
        best, origin = (best.unsqueeze(-1) + pair).max(dim=-2)
        origins.append(origin)
    path = [best.argmax(dim=-1)]
    for origin in reversed(origins):
        path.append(origin.gather(-1, path[-1].unsqueeze(-1)).squeeze(-1))
    return torch.stack(path[::-1], dim=-1)


def sampled_walk(
    start_scores: torch.Tensor, pair_scores: torch.Tensor, uniforms: torch.Tensor, temperature: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A walk that draws each slot from equation 2 at a temperature, with the distribution it drew from.

    Args:
        start_scores, pair_scores: as in [`greedy_walk`].
        uniforms (`torch.Tensor` of shape `[*, S]`): in [0, 1); slot `s` takes the first candidate, in rank order,
            whose cumulative probability exceeds `uniforms[..., s]`.
        temperature (`float` or `torch.Tensor` of shape `[*]`): above 0.

    Returns:
        candidate indices `[*, S]` and proposal probabilities `[*, S, K]`.
    """
    index, probs = draw_candidate(start_scores, uniforms[..., 0], temperature)
    walk, proposal = [index], [probs]
    for s, pair in enumerate(pair_scores.unbind(dim=-3), start=1):
        index, probs = draw_candidate(conditional_scores(pair, walk[-1]), uniforms[..., s], temperature)
        walk.append(index)
        proposal.append(probs)
    return torch.stack(walk, dim=-1), torch.stack(proposal, dim=-2)


def draw_candidate(
    scores: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One slot of [`sampled_walk`]: the index `[*]` drawn from scores `[*, K]`, and the probabilities `[*, K]`."""
    temperature = torch.as_tensor(temperature, dtype=scores.dtype, device=scores.device).unsqueeze(-1)
    probs = (scores / temperature).softmax(dim=-1)
    # Rounding may leave the sum below a uniform; the last candidate that can be drawn takes the rest.
    last = scores.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum((probs.cumsum(dim=-1) <= uniform.unsqueeze(-1)).sum(dim=-1), last), probs


def path_score(start_scores: torch.Tensor, pair_scores: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Sum `[*]` of the scores along a path `[*, S]`."""
    total = start_scores.gather(-1, path[..., :1]).squeeze(-1)
    for s, pair in enumerate(pair_scores.unbind(dim=-3)):
        total = total + conditional_scores(pair, path[..., s]).gather(-1, path[..., s + 1 : s + 2]).squeeze(-1)
    return total


__all__ = [
    "Lattice",
    "candidate_features",
    "candidate_pool",
    "conditional_scores",
    "draw_candidate",
    "greedy_walk",
    "lattice_scores",
    "path_score",
    "processed_slots",
    "processed_walk",
    "sampled_walk",
    "viterbi_path",
]
