# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Linear layers on CPUs, where BLAS takes far longer than a product needs.

Reading the weights bounds a product of few rows, but BLAS first brings them into a layout of its own, anew in every
pass; on AMD CPUs it is slow with many rows, too. Here copies are kept in oneDNN's layout. Products are those of the
weights' dtype, added up in another order.

Shapes: `in` and `out` widths of a layer.
"""

import functools
import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils import logging


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .modeling_dflash import DFlashModel

logger = logging.get_logger(__name__)

# "1" packs whatever the size of a model, "0" nothing; unset, models up to `LARGEST_MODEL`.
VARIABLE = "LILICORR_PACK"
# Bytes of weights; as many again are kept.
LARGEST_MODEL = 2 << 30
# Below this many weights, and for fewer rows, there is nothing to gain.
SMALLEST_WEIGHT = 1 << 16
FEWEST_ROWS = 2
# Words of eight bytes whose sum is compared: less than a head of attention has, should heads change places.
PIECE = 16
# What the layout is chosen for; products of more rows or fewer are no slower by it.
TYPICAL_ROWS = 64


def packed_copy(weight: torch.Tensor) -> torch.Tensor:
    """A copy of `weight [out, in]` in oneDNN's layout. Nothing but [`packed_linear`] can read it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` by a [`packed_copy`] of the weight."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], None)


@functools.cache
def cpu_packs_bf16() -> bool:
    """Whether a packed copy of its weight makes a bf16 product of few rows fastest; with AMX it hardly does."""
    amx = torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_avx512_bf16_supported() and not amx and torch.backends.mkldnn.is_available()


class PackedWeights:
    """
    Copies of weights `[out, in]` in oneDNN's layout. What it keeps depends on weights alone, so threads share it; a
    copy of it, or a pickled one, starts anew.
    """

    def __init__(self) -> None:
        # The copy of a weight and the sums of what it was made from; it goes when the weight does.
        self.copies = WeakTensorKeyDictionary()

    def __reduce__(self):
        return PackedWeights, ()

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The copy of `weight`, made anew if the weight is not what it was.

        Merging an adapter by `weight.data += ...` leaves no other trace than the numbers themselves, and a stale copy
        would change the text. So they are compared, by sums over pieces of rows that cost as much as reading them.
        """
        words, place = weight.detach().view(torch.int64), (weight.data_ptr(), weight._version)
        sums = words.unflatten(1, (-1, math.gcd(words.shape[1], PIECE))).sum(dim=-1)
        kept = self.copies.get(weight)
        if kept is None or kept[0] != place or not torch.equal(kept[1], sums):
            kept = place, sums, packed_copy(weight.detach())
            self.copies[weight] = kept
        return kept[2]


class PackedLinears(TorchFunctionMode):
    """
    Within it, whoever calls `F.linear` with several rows and one of these weights gets the product of its packed copy.
    It sees one thread's calls and touches no module: hooks, adapters and quantised layers work as ever.

    Args:
        weights (list of `nn.Parameter`): see [`can_be_packed`]. What a module loads for the moment is not among them.
        packed ([`PackedWeights`]): compared with each weight at its first use.
    """

    def __init__(self, weights: list[nn.Parameter], packed: PackedWeights):
        super().__init__()
        self.weights = {id(weight): weight for weight in weights}
        self.packed = packed
        self.copies: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and not kwargs and self.packs(*args[:2]):
            x, weight, *bias = args
            if id(weight) not in self.copies:
                self.copies[id(weight)] = self.packed.of(weight)
            return packed_linear(x, self.copies[id(weight)], *bias)
        # Of the thousands of calls of a pass most come by here, and unpacking nothing takes time, too.
        return func(*args, **kwargs) if kwargs else func(*args)

    def packs(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        known = id(weight) in self.weights and x.dtype == weight.dtype
        return known and x.numel() // weight.shape[1] >= FEWEST_ROWS


def packed_linears(model: "PreTrainedModel", packed: PackedWeights) -> AbstractContextManager[Any]:
    """[`PackedLinears`] for passes of a target or a drafter, or a context in which nothing happens.

    Where the environment asks for them and they cannot be had, one warning says why.

    Raises:
        `ValueError`: if the environment asks for something else.
    """
    wanted = os.environ.get(VARIABLE) or None
    if wanted not in (None, "0", "1"):
        raise ValueError(f"${VARIABLE} is {wanted!r}; it may be 1, for any size, or 0, for none.")
    if wanted == "0":
        return nullcontext()
    weights = [p for p in model.parameters() if can_be_packed(p)]
    if (reason := why_not(model, weights)) is not None:
        if wanted == "1":
            name = f"{type(model).__name__} {model.name_or_path!r}"
            logger.warning_once(f"${VARIABLE} is 1, but the weights of {name} are not packed: {reason}.")
        return nullcontext()
    size = sum(p.numel() * p.element_size() for p in weights)
    return PackedLinears(weights, packed) if wanted == "1" or size <= LARGEST_MODEL else nullcontext()


def packed_draft(drafter: "DFlashModel") -> AbstractContextManager[Any]:
    """[`packed_linears`] for drafts, in fp32 alone: in bf16 looking out for products costs what packing them gains."""
    fp32 = drafter.dtype == torch.float32
    return packed_linears(drafter, drafter.packed_weights) if fp32 else nullcontext()


def can_be_packed(weight: nn.Parameter) -> bool:
    """Whether it is a large matrix of plain numbers on a CPU, in fp32, or in bf16 where that gains enough."""
    return (
        type(weight) is nn.Parameter
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and cpu_packs_bf16()))
        and weight.device.type == "cpu"
        and weight.ndim == 2
        and weight.numel() >= SMALLEST_WEIGHT
        # Bits are summed up eight bytes at a time.
        and weight.is_contiguous()
        and all(n * weight.element_size() % 8 == 0 for n in (weight.shape[1], weight.storage_offset()))
    )


def why_not(model: "PreTrainedModel", weights: list[nn.Parameter]) -> str | None:
    """What keeps a model's weights from being packed; `None` if nothing does."""
    if not weights:
        return "it has no large matrix on a CPU, in fp32 or in a bf16 that this CPU gains from"
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return "this PyTorch is without oneDNN, or has it switched off"
    if not torch.cpu._is_avx512_supported():
        return "it does not pay on CPUs without AVX-512"
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return "a gradient or autocast is wanted"
    if any(module._compiled_call_impl is not None or "forward" in vars(module) for module in model.modules()):
        return "a forward of it is compiled or replaced"
    return None


__all__ = [
    "FEWEST_ROWS",
    "PackedLinears",
    "PackedWeights",
    "cpu_packs_bf16",
    "packed_copy",
    "packed_draft",
    "packed_linear",
    "packed_linears",
]
