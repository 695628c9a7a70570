# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The output head's product for a draft on CPUs, where in fp32 it takes longer than the rest of the draft together.

A draft has no need of exact logits, only of good candidates. CPUs with bf16 instructions therefore multiply a bf16
copy of the head, and the candidates that come out best are computed again from the head as it is. Shapes: `r` rows,
`V` vocabulary, `M` hidden width.
"""

import functools
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from .linears_lilicorr import cpu_packs_bf16, packed_copy, packed_linear


# Each row's best candidates of the bf16 product whose logits are computed exactly; a lattice takes 8 of them or 16.
EXACT_CANDIDATES = 32
# Below this many weights there is nothing to gain.
SMALLEST_HEAD = 1 << 22


class DraftProduct:
    """
    Logits of a draft: the output head's product on CPUs up to the rounding of bf16, exact for each row's best
    candidates. What it keeps depends on heads' weights alone, so threads share it; a copy of it, or a pickled one,
    starts anew.
    """

    def __init__(self) -> None:
        # Of a head's weight, by how they were made: versions it had and copies of them; they go when the weight does.
        self.copies = WeakTensorKeyDictionary()

    def __reduce__(self):
        return DraftProduct, ()

    def __call__(self, head: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Logits `[r, V]` of states `[r, M]` in the head's dtype.

        Args:
            head (`nn.Module`): the target's. Anything but a plain `nn.Linear` is called as it is.
        """
        product = self.prepared(head, packs=cpu_packs_bf16()) if len(states) > 1 else None
        return head(states) if product is None else product(head, states)

    def prepared(
        self, head: nn.Module, packs: bool = False
    ) -> Callable[[nn.Module, torch.Tensor], torch.Tensor] | None:
        """The product for two rows and more, its copy made; `None` where `head` is called as it is.

        Args:
            packs (`bool`): by a copy in oneDNN's own layout, which cannot be compiled.
        """
        if not multiplies_in_bf16(head):
            return None
        if packs:
            multiply = functools.partial(packed_linear, packed=self.copy(head.weight, packed_bf16_copy))
        elif head.weight.dtype == torch.bfloat16:
            multiply = functools.partial(weight_first, weight=head.weight)
        else:
            multiply = functools.partial(weight_first, weight=self.copy(head.weight, torch.Tensor.bfloat16))
        return functools.partial(bf16_product, multiply)

    def copy(self, weight: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What `make` makes of `weight`, made once and again after a change that leaves a trace."""
        made, state = self.copies.setdefault(weight, {}), (weight.data_ptr(), weight._version)
        known, copy = made.get(make, (None, None))
        if known != state:
            copy = make(weight.detach())
            made[make] = (state, copy)
        return copy


def bf16_product(
    multiply: Callable[[torch.Tensor], torch.Tensor], head: nn.Linear, states: torch.Tensor
) -> torch.Tensor:
    """Logits `[r, V]`: those of a bf16 head, or coarse ones of an fp32 head, exact for the best candidates.

    Args:
        multiply (`Callable`): from bf16 states to their product with the head's weight in bf16.
    """
    coarse = multiply(states.bfloat16())
    if head.bias is not None:
        coarse = coarse + head.bias.to(coarse.dtype)
    if head.weight.dtype == torch.bfloat16:
        return coarse
    ids = coarse.topk(EXACT_CANDIDATES, dim=-1).indices
    exact = (F.embedding(ids, head.weight) @ states.unsqueeze(-1)).squeeze(-1)
    if head.bias is not None:
        exact = exact + head.bias[ids]
    return coarse.to(exact.dtype).scatter_(-1, ids, exact)


def weight_first(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`F.linear` with the weight as left factor: for few rows in bf16 less than half the time on CPUs with AMX."""
    return (weight @ states.t()).t().contiguous()


def packed_bf16_copy(weight: torch.Tensor) -> torch.Tensor:
    return packed_copy(weight.bfloat16())


def multiplies_in_bf16(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `head` is a large plain linear layer on a CPU that has instructions for bf16."""
    return (
        type(head) is nn.Linear
        and head.weight.device.type == "cpu"
        and head.weight.dtype in (torch.float32, torch.bfloat16)
        and head.weight.numel() >= SMALLEST_HEAD
        and not torch.is_grad_enabled()
        and not is_watched(head)
        and cpu_has_bf16()
    )


def is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to see the module's calls: by hooks, or as accelerate does, by a `forward` of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether the CPU has instructions that multiply in bf16; without them fp32 is much faster."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


__all__ = ["DraftProduct", "cpu_has_bf16", "is_watched", "multiplies_in_bf16"]
