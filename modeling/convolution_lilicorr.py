# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Convolutions along a block around a drafter's sublayers, of DFlash2 and of LiLiCorr's convolutional variant.

Shapes: `b` batch, `N` packed blocks, `B` block size, `M` hidden width.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_lilicorr import LiLiCorrConfig


class BlockConvolution(nn.Module):
    """Convolutions along a block before and after a sublayer, with kernels made from the sublayer's own input.

    The kernel of a position, tap and channel is a learned base plus a projection of that position's state, the same
    for the channels of a group. Tap `t` reads the row `t` places earlier in the same block, zero before its start.
    """

    def __init__(self, config: LiLiCorrConfig):
        super().__init__()
        self.taps, self.group_size, self.block_size = (
            config.conv_kernel_size,
            config.conv_group_size,
            config.block_size,
        )
        groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * groups, bias=False)

    def forward(self, states: torch.Tensor, block_size: int | None = None) -> list[Callable[..., torch.Tensor]]:
        """The convolutions before and after the sublayer whose normed input `[b, N * B, M]` is `states`.

        Args:
            states (`torch.Tensor` of shape `[b, N * B, M]`): one or several packed blocks.
            block_size (`int`): `B`, if it is not the configured one.
        """
        kernels = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1))
        kernels = self.base_kernel + kernels.repeat_interleave(self.group_size, dim=-1)
        return [partial(convolve_blocks, kernels[..., side, :, :], block_size or self.block_size) for side in (0, 1)]


def convolve_blocks(kernels: torch.Tensor, block_size: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows `[b, N * B, M]` convolved along each block of `B` with kernels `[b, N * B, taps, M]`."""
    blocks = rows.unflatten(1, (-1, block_size))
    kernels = kernels.unflatten(1, (-1, block_size))
    taps = kernels.shape[-2]
    shifted = [F.pad(blocks, (0, 0, t, 0))[:, :, :block_size] for t in range(taps)]
    return (torch.stack(shifted, dim=-2) * kernels).sum(dim=-2).flatten(1, 2)


__all__ = ["BlockConvolution", "convolve_blocks"]
