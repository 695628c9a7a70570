"""Triton kernels against the functions they stand for: in Triton's interpreter here, compiled with a GPU."""

import pytest
import torch


pytest.importorskip("triton")

from lilicorr_hf.modeling.kernels_lilicorr import (  # noqa: E402
    CHUNK,
    fused_greedy_walk,
    fused_viterbi_path,
    kernels_available,
    topk_logsumexp,
    topk_logsumexp_reference,
)
from lilicorr_hf.modeling.lattice_lilicorr import candidate_pool, greedy_walk, viterbi_path  # noqa: E402


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not kernels_available(DEVICE, 8), reason="Triton was imported without its interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "k"), [((3, 17), 1), ((2, 2, 1000), 4), ((2, CHUNK), 8), ((1, CHUNK + 1), 8), ((1, 3 * CHUNK - 5), 16)]
)
def test_topk_and_logsumexp(shape, k, dtype):
    torch.manual_seed(0)
    logits = (4 * torch.randn(shape, device=DEVICE)).to(dtype)
    for actual, expected in zip(topk_logsumexp(logits, k), topk_logsumexp_reference(logits, k), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-6)


def test_the_reference_is_the_candidate_pool():
    torch.manual_seed(1)
    logits = torch.randn(2, 5, 300)
    values, ids, normaliser = topk_logsumexp_reference(logits, 8)
    expected_ids, log_probs = candidate_pool(logits, 8)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(values - normaliser.unsqueeze(-1), log_probs)


def test_ties_go_to_the_lowest_id_across_chunks():
    logits = torch.zeros(2, CHUNK + 9, device=DEVICE)
    logits[0, [7, 3, CHUNK + 2, CHUNK + 1]] = 1.0
    _, ids, _ = topk_logsumexp(logits, 8)
    assert ids.tolist() == [[3, 7, CHUNK + 1, CHUNK + 2, 0, 1, 2, 4], list(range(8))]


def test_forbidden_tokens_and_strided_rows():
    torch.manual_seed(2)
    logits = torch.randn(CHUNK + 30, 3, device=DEVICE).t()
    logits[1] = -torch.inf
    logits[1, [CHUNK + 4, 11]] = torch.tensor([2.0, 1.0], device=DEVICE)
    for actual, expected in zip(topk_logsumexp(logits, 4), topk_logsumexp_reference(logits, 4), strict=True):
        torch.testing.assert_close(actual, expected)


def test_rows_of_nan_give_ids_that_exist():
    _, ids, normaliser = topk_logsumexp(torch.full((1, 50), torch.nan, device=DEVICE), 4)
    assert (ids >= 0).all() and (ids < 50).all() and normaliser.isnan().all()


@pytest.mark.parametrize(
    ("slots", "k", "leading"), [(7, 8, (2, 3)), (15, 16, (1,)), (2, 4, (5,)), (1, 8, (2,)), (3, 1, ())]
)
@pytest.mark.parametrize(
    ("kernel", "reference"), [(fused_greedy_walk, greedy_walk), (fused_viterbi_path, viterbi_path)]
)
def test_paths(kernel, reference, slots, k, leading):
    torch.manual_seed(3)
    start = torch.randn(*leading, k, device=DEVICE)
    # Few distinct values, so that there are ties.
    pair = torch.randn(*leading, slots - 1, k, k, device=DEVICE).round()
    path = kernel(start, pair)
    assert path.dtype == torch.int64
    assert torch.equal(path, reference(start, pair))


@pytest.mark.parametrize("k", [0, 3, 32])
def test_other_numbers_of_candidates_are_refused(k):
    assert not kernels_available(DEVICE, k)
    with pytest.raises(ValueError, match="power of two up to 16"):
        topk_logsumexp(torch.zeros(1, 64, device=DEVICE), k)


def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(ValueError, match="no 8 best of 5"):
        topk_logsumexp(torch.zeros(1, 5, device=DEVICE), 8)
