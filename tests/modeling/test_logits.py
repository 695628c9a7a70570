"""A draft's logits: fast on CPUs, exact for the candidates."""

import copy

import pytest
import torch
from torch import nn

from lilicorr_hf.modeling import logits_lilicorr
from lilicorr_hf.modeling.logits_lilicorr import EXACT_CANDIDATES, SMALLEST_HEAD, DraftProduct


WIDTH = 64
VOCAB = SMALLEST_HEAD // WIDTH


@pytest.fixture(autouse=True, params=["left factor", "packed"])
def bf16_cpu(request, monkeypatch):
    """Other CPUs emulate what this is for, but for packed copies."""
    packs = request.param == "packed"
    if packs and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("needs a CPU with AVX-512's bf16 instructions")
    monkeypatch.setattr(logits_lilicorr, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(logits_lilicorr, "cpu_packs_bf16", lambda: packs)
    with torch.no_grad():
        yield


def random_head(bias: bool = False, vocab: int = VOCAB) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, vocab, bias=bias), torch.randn(5, WIDTH) * 8


@pytest.mark.parametrize("bias", [False, True])
def test_the_best_candidates_are_those_of_the_head_and_exact(bias):
    head, states = random_head(bias)
    logits, reference = DraftProduct()(head, states), head(states)
    assert not torch.equal(logits, reference)
    best, expected = (x.topk(EXACT_CANDIDATES // 2, dim=-1) for x in (logits, reference))
    assert torch.equal(best.indices, expected.indices)
    torch.testing.assert_close(best.values, expected.values)
    torch.testing.assert_close(logits, reference, rtol=0.01, atol=0.1)
    torch.testing.assert_close(logits.logsumexp(-1), reference.logsumexp(-1), rtol=0, atol=1e-2)


def test_a_bf16_head_is_multiplied_in_its_own_dtype():
    head, states = random_head(bias=True)
    head, states = head.bfloat16(), states.bfloat16()
    logits = DraftProduct()(head, states)
    assert logits.dtype == torch.bfloat16
    assert logits.is_contiguous()
    torch.testing.assert_close(logits, head(states), rtol=0.01, atol=0.1)


def test_a_changed_head_is_copied_again():
    product, (head, states) = DraftProduct(), random_head()
    product(head, states)
    head.weight.neg_()
    torch.testing.assert_close(product(head, states), head(states), rtol=0.01, atol=0.1)
    head.weight.data = head.weight.data.flip(0)
    torch.testing.assert_close(product(head, states), head(states), rtol=0.01, atol=0.1)


def test_other_heads_are_called_as_they_are():
    head, states = random_head()
    calls: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: calls.append(output))
    assert torch.equal(DraftProduct()(head, states), head(states))
    assert len(calls) == 2
    hook.remove()
    small, states = random_head(vocab=VOCAB // 2)
    assert torch.equal(DraftProduct()(small, states), small(states))
    with torch.enable_grad():
        assert DraftProduct()(head, states).requires_grad


def test_a_copy_goes_with_its_head():
    product, (head, states) = DraftProduct(), random_head()
    product(head, states)
    assert len(product.copies) == 1
    assert len(copy.deepcopy(product).copies) == 0
    del head
    assert len(product.copies) == 0
