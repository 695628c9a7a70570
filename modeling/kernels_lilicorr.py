# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Triton kernels of the scoring pass, each under the signature of the function it stands for.

| kernel | stands for | reads |
|---|---|---|
| [`fused_candidate_pool`] | [`candidate_pool`] | the logits once |
| [`fused_greedy_walk`] | [`greedy_walk`] | `S` rows of `K` scores |
| [`fused_viterbi_path`] | [`viterbi_path`] | all scores once |

[`with_kernel`] puts each in its place. None waits for the device or tunes itself, so that one which has run before can
be recorded in a CUDA graph.

Shapes: `*` any leading dimensions, `S` slots, `K` candidates of a slot, a power of two up to 16, `V` vocabulary. With
`TRITON_INTERPRET=1` in the environment before Triton is imported they run on a CPU, slowly.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from transformers.utils import logging


try:
    import triton
    import triton.language as tl
except ImportError:  # Triton comes with builds of torch for GPUs.
    triton = None

logger = logging.get_logger(__name__)

# Where kernels take the place of their references.
DEVICES = {"cuda"}
# Kernels that could not be had.
UNAVAILABLE: set[Callable] = set()
LARGEST_K = 16
CHUNK = 4096
Reference = TypeVar("Reference", bound=Callable)


def kernels_available(device: torch.device, k: int) -> bool:
    """Whether the kernels take tensors on `device` with `k` candidates a slot."""
    return triton is not None and is_served(k) and (device.type == "cuda" or triton.knobs.runtime.interpret)


def is_served(k: int) -> bool:
    return 1 <= k <= LARGEST_K and k & (k - 1) == 0


def kernels_apply(k: int, *tensors: torch.Tensor) -> bool:
    """Whether kernels take the place of their references: on tensors of one GPU, with a `k` they take, unless a
    gradient is wanted. `torch.compile` fuses the references itself."""
    return (
        tensors[0].device.type in DEVICES
        and kernels_available(tensors[0].device, k)
        and all(x.device == tensors[0].device and x.shape[-1] >= k for x in tensors)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )


def with_kernel(kernel: Callable) -> Callable[[Reference], Reference]:
    """Decorates the reference of a kernel, which stays its `__wrapped__`: the kernel runs where [`kernels_apply`].

    One that cannot be compiled or launched gives way to the reference for good, with one warning that says why.
    """

    def decorate(reference: Reference) -> Reference:
        @functools.wraps(reference)
        def dispatch(*args, **kwargs):
            if torch.compiler.is_compiling() or kernel in UNAVAILABLE:
                return reference(*args, **kwargs)
            given = [*args, *kwargs.values()]
            tensors = [x for x in given if isinstance(x, torch.Tensor)]
            k = next((x for x in given if isinstance(x, int)), tensors[0].shape[-1])
            if not kernels_apply(k, *tensors):
                return reference(*args, **kwargs)
            try:
                # Triton launches on the current device, whatever holds the tensors.
                with torch.cuda.device_of(tensors[0]):
                    return kernel(*args, **kwargs)
            except Exception as error:  # Whatever a compiler or a driver raises, the text must go on.
                logger.warning(f"{kernel.__name__} cannot be had here and gives way to its reference: {error!r:.500}")
                UNAVAILABLE.add(kernel)
                return reference(*args, **kwargs)

        return dispatch  # type: ignore[return-value]

    return decorate


def fused_candidate_pool(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[`candidate_pool`] by [`topk_logsumexp`]; of equal logits the lowest id comes first."""
    values, ids, normaliser = topk_logsumexp(logits, k)
    return ids, values - normaliser.unsqueeze(-1)


def topk_logsumexp(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `k` best of each row and the normaliser of its softmax, in fp32.

    Two launches, the first of which reads the logits and the second a few KB.

    Args:
        logits (`torch.Tensor` of shape `[*, V]`).

    Returns:
        values `[*, k]` in descending order, their ids `[*, k]`, of equal values the lowest first, and logsumexp `[*]`.

    Raises:
        `ValueError`: for a `k` that is no power of two up to 16, or more than there are logits.
    """
    vocab = logits.shape[-1]
    check_k(k)
    if k > vocab:
        raise ValueError(f"There are no {k} best of {vocab} logits.")
    rows = logits.reshape(-1, vocab)
    chunks = triton.cdiv(vocab, CHUNK)
    shape = (rows.shape[0], chunks)
    values = rows.new_empty((*shape, k), dtype=torch.float32)
    ids = rows.new_empty((*shape, k), dtype=torch.int32)
    peaks, sums = (rows.new_empty(shape, dtype=torch.float32) for _ in range(2))
    _chunk_topk[shape](rows, values, ids, peaks, sums, vocab, rows.stride(0), rows.stride(1), K=k, CHUNK=CHUNK)
    best = values.new_empty((shape[0], k))
    best_ids = ids.new_empty((shape[0], k), dtype=torch.int64)
    normaliser = values.new_empty(shape[0])
    padded = triton.next_power_of_2(chunks)
    _merge_topk[(shape[0],)](values, ids, peaks, sums, best, best_ids, normaliser, vocab, chunks, K=k, PADDED=padded)
    leading = logits.shape[:-1]
    return best.view(*leading, k), best_ids.view(*leading, k), normaliser.view(leading)


def fused_greedy_walk(start_scores: torch.Tensor, pair_scores: torch.Tensor) -> torch.Tensor:
    """[`greedy_walk`] in one launch; raises `ValueError` as [`topk_logsumexp`] does."""
    return _launch_path(_greedy_walk, start_scores, pair_scores)


def fused_viterbi_path(start_scores: torch.Tensor, pair_scores: torch.Tensor) -> torch.Tensor:
    """[`viterbi_path`] in one launch; raises `ValueError` as [`topk_logsumexp`] does."""
    slots = pair_scores.shape[-3] + 1
    shape = (*start_scores.shape[:-1], slots, start_scores.shape[-1])
    origins = start_scores.new_empty(shape, dtype=torch.int32)
    return _launch_path(_viterbi_path, start_scores, pair_scores, origins)


def _launch_path(kernel, start_scores: torch.Tensor, pair_scores: torch.Tensor, *scratch) -> torch.Tensor:
    k, slots = start_scores.shape[-1], pair_scores.shape[-3] + 1
    check_k(k)
    path = start_scores.new_empty((*start_scores.shape[:-1], slots), dtype=torch.int64)
    blocks = start_scores.numel() // k
    kernel[(blocks,)](start_scores.contiguous(), pair_scores.contiguous(), path, *scratch, slots, K=k, num_warps=1)
    return path


def check_k(k: int) -> None:
    if not is_served(k):
        raise ValueError(f"The kernels take a power of two up to {LARGEST_K} candidates a slot, got {k}.")


if triton is not None:

    @triton.jit
    def _take_best(values, ids):
        """The largest value, the lowest id that has it, and both arrays without it."""
        best = tl.max(values, axis=0)
        best_id = tl.min(tl.where(values == best, ids, 1 << 30), axis=0)
        taken = ids == best_id
        return best, best_id, tl.where(taken, float("-inf"), values), tl.where(taken, 1 << 30, ids)

    @triton.jit
    def _chunk_topk(logits, values, ids, peaks, sums, vocab, row_stride, stride, K: tl.constexpr, CHUNK: tl.constexpr):
        row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = columns < vocab
        x = tl.load(logits + row * row_stride + columns * stride, mask=inside, other=float("-inf")).to(tl.float32)
        at = row * tl.num_programs(1) + chunk
        peak = tl.max(x, axis=0)
        # A chunk of nothing but -inf adds nothing.
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(peaks + at, peak)
        tl.store(sums + at, tl.sum(tl.exp(x - shift), axis=0))
        left = tl.where(inside, columns, 1 << 30)
        for i in tl.static_range(K):
            best, best_id, x, left = _take_best(x, left)
            tl.store(values + at * K + i, best)
            tl.store(ids + at * K + i, best_id)

    @triton.jit
    def _merge_topk(
        values,
        ids,
        peaks,
        sums,
        best_values,
        best_ids,
        normaliser,
        vocab,
        chunks,
        K: tl.constexpr,
        PADDED: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        chunk = tl.arange(0, PADDED)
        inside = chunk < chunks
        peak = tl.load(peaks + row * chunks + chunk, mask=inside, other=float("-inf"))
        part = tl.load(sums + row * chunks + chunk, mask=inside, other=0.0)
        top = tl.max(peak, axis=0)
        shift = tl.where(top == float("-inf"), 0.0, top)
        tl.store(normaliser + row, shift + tl.log(tl.sum(part * tl.exp(peak - shift), axis=0)))
        column = tl.arange(0, PADDED * K)
        inside = column < chunks * K
        x = tl.load(values + row * chunks * K + column, mask=inside, other=float("-inf"))
        left = tl.load(ids + row * chunks * K + column, mask=inside, other=1 << 30)
        for i in tl.static_range(K):
            best, best_id, x, left = _take_best(x, left)
            tl.store(best_values + row * K + i, best)
            # Where nothing compares, in a row of NaN, an id that exists.
            tl.store(best_ids + row * K + i, tl.minimum(best_id, vocab - 1).to(tl.int64))

    @triton.jit
    def _first_best(scores, K: tl.constexpr):
        """Index of the largest score, the lowest of equal ones; the last of none that compares."""
        index = tl.arange(0, K)
        best = tl.max(scores, axis=0)
        return tl.min(tl.where(scores == best, index, K - 1), axis=0)

    @triton.jit
    def _greedy_walk(start, pair, path, slots, K: tl.constexpr):
        block = tl.program_id(0).to(tl.int64)
        index = tl.arange(0, K)
        chosen = _first_best(tl.load(start + block * K + index), K)
        tl.store(path + block * slots, chosen.to(tl.int64))
        for s in range(1, slots):
            scores = pair + (block * (slots - 1) + s - 1) * K * K
            chosen = _first_best(tl.load(scores + chosen * K + index), K)
            tl.store(path + block * slots + s, chosen.to(tl.int64))

    @triton.jit
    def _viterbi_path(start, pair, path, origins, slots, K: tl.constexpr):
        block = tl.program_id(0).to(tl.int64)
        index = tl.arange(0, K)
        best = tl.load(start + block * K + index)
        for s in range(1, slots):
            scores = pair + (block * (slots - 1) + s - 1) * K * K
            # Columns are predecessors, so that the best total is found along axis 1 and stays where it is needed.
            totals = tl.load(scores + index[None, :] * K + index[:, None]) + best[None, :]
            best = tl.max(totals, axis=1)
            origin = tl.min(tl.where(totals == best[:, None], index[None, :], K - 1), axis=1)
            tl.store(origins + (block * slots + s) * K + index, origin)
        chosen = _first_best(best, K)
        tl.store(path + block * slots + slots - 1, chosen.to(tl.int64))
        tl.debug_barrier()
        for back in range(1, slots):
            s = slots - back
            chosen = tl.load(origins + (block * slots + s) * K + chosen)
            tl.store(path + block * slots + s - 1, chosen.to(tl.int64))


__all__ = [
    "fused_candidate_pool",
    "fused_greedy_walk",
    "fused_viterbi_path",
    "kernels_apply",
    "kernels_available",
    "topk_logsumexp",
    "with_kernel",
]
