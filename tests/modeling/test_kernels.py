"""Triton kernels against the functions they stand for: in Triton's interpreter here, compiled with a GPU."""

import logging

import pytest
import torch
from tiny import tiny_assistant, tiny_target
from torch._subclasses import FakeTensorMode

from lilicorr_hf.modeling import kernels_lilicorr as kernels
from lilicorr_hf.modeling.kernels_lilicorr import (
    CHUNK,
    fused_candidate_pool,
    fused_greedy_walk,
    fused_viterbi_path,
    kernels_apply,
    kernels_available,
    topk_logsumexp,
)
from lilicorr_hf.modeling.lattice_lilicorr import candidate_pool, greedy_walk, viterbi_path


pytest.importorskip("triton")


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not kernels_available(DEVICE, 8), reason="Triton was imported without its interpreter")


def reference_topk(logits, k):
    """The slow, obvious version."""
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k], logits.float().logsumexp(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "k"), [((3, 17), 1), ((2, 2, 1000), 4), ((2, CHUNK), 8), ((1, CHUNK + 1), 8), ((1, 3 * CHUNK - 5), 16)]
)
def test_topk_and_logsumexp(shape, k, dtype):
    torch.manual_seed(0)
    logits = (4 * torch.randn(shape, device=DEVICE)).to(dtype)
    for actual, expected in zip(topk_logsumexp(logits, k), reference_topk(logits, k), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-6)


def test_the_candidate_pool():
    torch.manual_seed(1)
    logits = torch.randn(2, 5, 300, device=DEVICE)
    ids, log_probs = fused_candidate_pool(logits, 8)
    expected_ids, expected = candidate_pool.__wrapped__(logits, 8)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(log_probs, expected)


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
    for actual, expected in zip(topk_logsumexp(logits, 4), reference_topk(logits, 4), strict=True):
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
    assert torch.equal(path, reference.__wrapped__(start, pair))


@pytest.mark.parametrize("k", [0, 3, 32])
def test_other_numbers_of_candidates_are_refused(k):
    assert not kernels_available(DEVICE, k)
    with pytest.raises(ValueError, match="power of two up to 16"):
        topk_logsumexp(torch.zeros(1, 64, device=DEVICE), k)


def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(ValueError, match="no 8 best of 5"):
        topk_logsumexp(torch.zeros(1, 5, device=DEVICE), 8)


def test_where_kernels_apply():
    with FakeTensorMode():
        logits, scores = torch.empty(2, 64, device="cuda"), torch.empty(8, 8, device="cuda")
        assert kernels_apply(8, logits) and kernels_apply(8, scores, scores)
        assert not kernels_apply(6, logits) and not kernels_apply(32, logits)
        assert not kernels_apply(8, torch.empty(2, 5, device="cuda"))
        on_cpu = torch.empty(8, 8)
        assert not kernels_apply(8, on_cpu) and not kernels_apply(8, scores, on_cpu)
        trained = torch.empty(2, 64, device="cuda", requires_grad=True)
        assert not kernels_apply(8, trained)
        with torch.no_grad():
            assert kernels_apply(8, trained)


@pytest.fixture
def launched(monkeypatch):
    """Kernels stand in on a CPU, too; the `k` of each launch."""
    calls: list[int] = []
    monkeypatch.setattr(kernels, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(kernels, "UNAVAILABLE", set())
    monkeypatch.setattr(kernels, "check_k", calls.append)
    return calls


@torch.no_grad()
def test_a_whole_draft_by_kernels_is_that_by_references(launched, monkeypatch):
    target, ids = tiny_target("llama").to(DEVICE), torch.tensor([[1, 2, 3]], device=DEVICE)
    assistant = tiny_assistant(candidate_topk=4).double().to(DEVICE)
    drafts = []
    real = type(assistant).choose

    def choose(self, logits, output, *args, **kwargs):
        drafts.append(real(self, logits, output, *args, **kwargs))
        assert launched == [4, 4]
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "DEVICES", set())
            expected = real(self, logits, output, *args, **kwargs)
        assert len(launched) == 2
        launched.clear()
        for name in ("candidate_ids", "walk"):
            assert torch.equal(drafts[-1].lattice[name], expected.lattice[name])
        for name in ("log_probs", "start_scores", "pair_scores"):
            torch.testing.assert_close(drafts[-1].lattice[name], expected.lattice[name], atol=1e-5, rtol=1e-5)
        assert torch.equal(drafts[-1].token_ids, expected.token_ids)
        return drafts[-1]

    monkeypatch.setattr(type(assistant), "choose", choose)
    plain = target.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=assistant), plain)
    assert len(drafts) > 2 and not kernels.UNAVAILABLE


def test_gradients_and_compilers_get_the_references(launched):
    logits = torch.randn(3, 20, device=DEVICE, requires_grad=True)
    candidate_pool(logits, k=4)[1].sum().backward()
    start, pair = torch.randn(2, 4, device=DEVICE), torch.randn(2, 3, 4, 4, device=DEVICE)
    compiled = torch.compile(greedy_walk, fullgraph=True, backend="eager")
    assert torch.equal(compiled(start, pair), greedy_walk.__wrapped__(start, pair))
    assert logits.grad is not None and not launched
    greedy_walk(pair_scores=pair, start_scores=start)
    assert launched == [4]


def test_a_kernel_that_cannot_be_had_gives_way_with_one_warning(launched, caplog, monkeypatch):
    def fail(k):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "check_k", fail)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(kernels.logger, "propagate", True)
    start, pair = torch.randn(2, 4, device=DEVICE), torch.randn(2, 3, 4, 4, device=DEVICE)
    for _ in range(3):
        assert torch.equal(viterbi_path(start, pair), viterbi_path.__wrapped__(start, pair))
    warnings = [record.getMessage() for record in caplog.records if "fused_viterbi_path" in record.getMessage()]
    assert len(warnings) == 1 and "no compiler" in warnings[0]
    assert {fused_viterbi_path} == kernels.UNAVAILABLE


@pytest.mark.gpu
@torch.no_grad()
def test_kernels_can_be_recorded_in_a_graph():
    def block(logits, start, pair):
        return *candidate_pool(logits, 8), greedy_walk(start, pair), viterbi_path(start, pair)

    def random_inputs(seed):
        torch.manual_seed(seed)
        shapes = (2, 7, 3 * CHUNK), (2, 8), (2, 6, 8, 8)
        return [torch.randn(shape, device="cuda") for shape in shapes]

    inputs = random_inputs(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        block(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = block(*inputs)
    for buffer, x in zip(inputs, random_inputs(1), strict=True):
        buffer.copy_(x)
    graph.replay()
    for actual, expected in zip(outputs, block(*random_inputs(1)), strict=True):
        assert torch.equal(actual, expected)
    assert not kernels.UNAVAILABLE
