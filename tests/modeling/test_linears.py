"""Products over a block on CPUs: those of the linear layers, and never of weights that were."""

import copy
from contextlib import nullcontext

import pytest
import torch
from tiny import Oracle, tiny_assistant, tiny_target
from torch import nn
from torch.nn import functional as F
from transformers.utils import logging

from lilicorr_hf.modeling import decoding_lilicorr, linears_lilicorr
from lilicorr_hf.modeling.linears_lilicorr import PackedLinears, PackedWeights, cpu_packs_bf16, packed_linears


packs_bf16 = pytest.mark.skipif(not cpu_packs_bf16(), reason="needs AVX-512's bf16, without AMX")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=packs_bf16)]


@pytest.fixture(autouse=True)
def any_cpu_and_size(monkeypatch):
    """As on a CPU with AVX-512 alone, and for models of any size."""
    monkeypatch.setattr(linears_lilicorr, "SMALLEST_WEIGHT", 1)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    monkeypatch.setattr(linears_lilicorr, "cpu_packs_bf16", lambda: False)
    monkeypatch.delenv(linears_lilicorr.VARIABLE, raising=False)
    with torch.no_grad():
        yield


@pytest.fixture
def packed_products(monkeypatch) -> list[torch.Tensor]:
    """The inputs of packed products from here on."""
    inputs: list[torch.Tensor] = []
    product = torch.ops.mkldnn._linear_pointwise

    def spy(x, *args):
        inputs.append(x)
        return product(x, *args)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
    return inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 24), (1, 8, 24), (3, 5, 24), (300, 24)])
def test_products_are_those_of_the_layer(packed_products, shape, bias, dtype):
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 40, bias=bias, dtype=dtype), torch.randn(*shape, dtype=dtype)
    sliced = torch.randn(*shape[:-1], 48, dtype=dtype)[..., ::2]
    with PackedLinears([layer.weight], PackedWeights()):
        actual = layer(x), layer(sliced)
    assert len(packed_products) == 2
    # Sums of opposite numbers lose most of bf16's eight bits.
    tolerance = {} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 2e-2}
    torch.testing.assert_close(actual, (layer(x), layer(sliced)), **tolerance)


def test_others_are_called_as_they_are(packed_products):
    layer, other = nn.Linear(24, 40), nn.Linear(24, 40)
    x = torch.randn(4, 24)
    with PackedLinears([layer.weight], PackedWeights()):
        for y, module in ((x, other), (x[:1], layer), (x[:0], layer)):
            torch.testing.assert_close(module(y), y @ module.weight.t() + module.bias)
        with pytest.raises(RuntimeError):
            layer(x.bfloat16())
        F.linear(x, weight=layer.weight)
        assert not packed_products
        layer(x)
    layer(x)
    assert len(packed_products) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change", ["in place", "behind autograd's back", "replaced", "one bit", "rows swapped", "heads"]
)
def test_changed_weights_are_packed_again(change, dtype):
    layer, x, packed = nn.Linear(24, 40, dtype=dtype), torch.randn(4, 24, dtype=dtype), PackedWeights()
    before = packed.of(layer.weight)
    assert packed.of(layer.weight) is before
    if change == "in place":
        layer.weight.neg_()
    elif change == "replaced":
        layer.weight.data = torch.randn(40, 24, dtype=dtype)
    elif change == "one bit":
        layer.weight.data[7, 5] = layer.weight.data[7, 5].nextafter(torch.ones((), dtype=dtype))
    elif change == "rows swapped":
        layer.weight.data[[3, 4]] = layer.weight.data[[4, 3]]
    elif change == "heads":
        # What each row sums up to stays as it is.
        layer.weight.data.copy_(layer.weight.data.roll(8, dims=1))
    else:
        # As peft merges an adapter.
        layer.weight.data += 0.01 * torch.randn(40, 1, dtype=dtype) @ torch.randn(1, 24, dtype=dtype)
    assert packed.of(layer.weight) is not before
    with PackedLinears([layer.weight], packed):
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight + 0, layer.bias))


def test_a_copy_goes_with_its_weight():
    packed, layer = PackedWeights(), nn.Linear(24, 40)
    packed.of(layer.weight)
    assert len(packed.copies) == 1 and len(copy.deepcopy(packed).copies) == 0
    del layer
    assert len(packed.copies) == 0


@pytest.mark.parametrize("tree_budget", [0, 6])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_text_is_that_of_plain_decoding(packed_products, family, tree_budget):
    target = tiny_target(family).float()
    assistant = tiny_assistant(model_class=Oracle, tree_budget=tree_budget)
    ids = torch.tensor([[5, 9, 2, 33, 7]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 24}
    plain = assistant.answer = target.generate(ids, **options)
    assert not packed_products
    assert torch.equal(target.generate(ids, assistant_model=assistant, **options), plain)
    assert packed_products and all(x.shape[:-1].numel() >= 2 for x in packed_products)
    # A hook of the caller's sees what it saw.
    seen = len(packed_products)
    handle = target.lm_head.register_forward_hook(lambda module, inputs, output: -output)
    negated = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=assistant, **options), negated)
    assert len(packed_products) > seen
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_in_fp32_drafts_by_packed_products(packed_products, monkeypatch, dtype):
    """Even where its target's are left alone."""
    monkeypatch.setattr(decoding_lilicorr, "packed_linears", lambda *_: nullcontext())
    monkeypatch.setattr(linears_lilicorr, "cpu_packs_bf16", lambda: True)
    target, assistant = tiny_target("llama").float(), tiny_assistant().to(dtype)
    ids = torch.tensor([[5, 9, 2, 33, 7]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=assistant, **options), plain)
    assert bool(packed_products) == (dtype == torch.float32)


def test_prompts_are_packed_and_single_steps_are_left_alone(packed_products):
    target, assistant = tiny_target("llama").float(), tiny_assistant()
    target.generate(torch.ones(1, 9, dtype=torch.long), assistant_model=assistant, max_new_tokens=2, do_sample=False)
    assert packed_products and all(x.shape[:-1] == (1, 9) for x in packed_products)


def test_where_it_does_not_pay_nothing_happens(packed_products, monkeypatch):
    target = tiny_target("llama").float()
    assert isinstance(packed_linears(target, PackedWeights()), PackedLinears)
    with monkeypatch.context() as patch:
        patch.setattr(linears_lilicorr, "LARGEST_MODEL", 1000)
        assert not isinstance(packed_linears(target, PackedWeights()), PackedLinears)
        patch.setenv("LILICORR_PACK", "1")
        assert isinstance(packed_linears(target, PackedWeights()), PackedLinears)
    with monkeypatch.context() as patch:
        patch.setenv("LILICORR_PACK", "0")
        assert not isinstance(packed_linears(target, PackedWeights()), PackedLinears)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not isinstance(packed_linears(target, PackedWeights()), PackedLinears)
    assert not isinstance(packed_linears(target.bfloat16(), PackedWeights()), PackedLinears)


def without_onednn(patch, target):
    patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def without_avx512(patch, target):
    patch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)


def compiled(patch, target):
    target.model.layers[0].compile()


def in_bf16(patch, target):
    target.bfloat16()


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        (without_onednn, "without oneDNN"),
        (without_avx512, "without AVX-512"),
        (compiled, "compiled or replaced"),
        (in_bf16, "no large matrix"),
    ],
)
def test_what_cannot_be_had_is_said_once_if_it_was_asked_for(monkeypatch, caplog, obstacle, reason):
    target = tiny_target("llama").float()
    obstacle(monkeypatch, target)
    logging.enable_propagation()
    logging.get_logger(linears_lilicorr.__name__).warning_once.cache_clear()
    packed_linears(target, PackedWeights())
    assert not caplog.messages
    monkeypatch.setenv("LILICORR_PACK", "1")
    for _ in range(2):
        assert not isinstance(packed_linears(target, PackedWeights()), PackedLinears)
    logging.disable_propagation()
    assert len(caplog.messages) == 1 and reason in caplog.messages[0]


def test_another_wish_is_refused_before_any_compute(monkeypatch):
    monkeypatch.setenv("LILICORR_PACK", "yes")
    target = tiny_target("llama").float()
    target.register_forward_hook(lambda *_: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match=r"\$LILICORR_PACK is 'yes'; it may be 1.* or 0"):
        target.generate(torch.ones(1, 3, dtype=torch.long), assistant_model=tiny_assistant(), max_new_tokens=4)
