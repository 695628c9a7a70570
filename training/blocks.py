# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Many blocks of a sequence packed into one drafter pass.

Shapes: `b` rows, `T` tokens of a row, `N` blocks of a row, `B` block size. Queries are the `N * B` rows of the blocks,
keys the `T` context rows and the blocks behind them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask


# Rows and columns of a flex-attention tile.
TILE = 128


@dataclass
class Visibility:
    """What the rows of a block see: their document before the block's anchor, and the block itself.

    Args:
        start, end (`torch.LongTensor` of shape `[b, N]`): first key of the context, and the one behind its last.
        own (`torch.LongTensor` of shape `[b, N]`): first key of the block itself.
        keep (`torch.BoolTensor` of shape `[b, N]`): `False` for blocks that see nothing.
        block_size (`int`): `B`.
        num_keys (`int`): `T + N * B`.
    """

    start: torch.Tensor
    end: torch.Tensor
    own: torch.Tensor
    keep: torch.Tensor
    block_size: int
    num_keys: int

    @property
    def rule(self) -> Callable[..., torch.Tensor]:
        """Whether a query sees a key, as a mask function of transformers and torch."""
        # A kernel is compiled from it: a closure over tensors and the block size, the only thing it may depend on.
        start, end, own, keep, block_size = self.start, self.end, self.own, self.keep, self.block_size

        def sees(row, head, query, key):
            block = query // block_size
            context = (start[row, block] <= key) & (key < end[row, block])
            itself = (own[row, block] <= key) & (key < own[row, block] + block_size)
            return keep[row, block] & (context | itself)

        return sees

    def dense(self) -> torch.Tensor:
        """The rule as a boolean mask `[b, 1, N * B, T + N * B]`."""
        sizes = (self.keep.shape[0], self.keep.shape[1] * self.block_size, self.num_keys)
        row, query, key = (torch.arange(size, device=self.keep.device) for size in sizes)
        return self.rule(row[:, None, None, None], None, query[:, None], key)

    def tiled(self) -> BlockMask:
        """The same as tiles for flex attention, found from the ends of the intervals: asking the rule about every pair
        would make the dense mask first, and compiling that away would start anew with every shape of a batch."""
        first = torch.arange(0, self.num_keys, TILE, device=self.keep.device)
        start = torch.stack([self.start, self.own]).unsqueeze(-1)
        end = torch.stack([self.end, self.own + self.block_size]).unsqueeze(-1)
        kept = self.keep.unsqueeze(-1)
        seen = ((start < end) & (start < first + TILE) & (first < end)).any(dim=0) & kept
        full = ((start <= first) & (first + TILE <= end)).any(dim=0) & kept
        num_queries = self.keep.shape[1] * self.block_size

        def query_tiles(of_blocks):
            of_queries = of_blocks.repeat_interleave(self.block_size, dim=1)
            return F.pad(of_queries, (0, 0, 0, -num_queries % TILE)).unflatten(1, (-1, TILE)).unsqueeze(1)

        seen, full = query_tiles(seen).any(dim=3), query_tiles(full).all(dim=3)
        return BlockMask.from_kv_blocks(
            *counted(seen & ~full),
            *counted(full),
            BLOCK_SIZE=TILE,
            mask_mod=self.rule,
            seq_lengths=(num_queries, self.num_keys),
        )


def counted(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number `[*]` of the tiles that are set in the last dimension, and all indices of it, theirs first."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32), order.int()


@dataclass
class PackedBlocks:
    """
    Args:
        input_ids (`torch.LongTensor` of shape `[b, N * B]`): anchor, then masks, of each block.
        position_ids (`torch.LongTensor` of shape `[b, T + N * B]`): of the context rows and the blocks.
        attention_mask (`torch.BoolTensor` or `BlockMask` of shape `[b, 1, N * B, T + N * B]`): which context rows and
            block rows a row sees.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | BlockMask


def pack_blocks(
    input_ids: torch.Tensor,
    document_positions: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    block_size: int,
    mask_token_id: int,
    tiled: bool = False,
) -> PackedBlocks:
    """Packs blocks so that each is computed as if alone: a block sees its document before its anchor, and itself.

    Args:
        input_ids (`torch.LongTensor` of shape `[b, T]`).
        document_positions (`torch.LongTensor` of shape `[b, T]`): of each token in its document.
        anchors (`torch.LongTensor` of shape `[b, N]`): index of each block's first token in its row.
        keep (`torch.BoolTensor` of shape `[b, N]`): `False` for padding blocks, which hold masks only and see nothing;
            their output is meaningless.
        block_size (`int`): `B`.
        mask_token_id (`int`).
        tiled (`bool`): the mask for flex attention instead of the dense one.
    """
    rows, length = input_ids.shape
    num_blocks = anchors.shape[1]
    block_ids = input_ids.new_full((rows, num_blocks, block_size), mask_token_id)
    block_ids[..., 0] = torch.where(keep, input_ids.gather(1, anchors), mask_token_id)

    anchor_positions = document_positions.gather(1, anchors)
    block_positions = anchor_positions.unsqueeze(-1) + torch.arange(block_size, device=input_ids.device)
    position_ids = torch.cat([document_positions, block_positions.flatten(1)], dim=1)

    own = torch.arange(length, position_ids.shape[1], block_size, device=input_ids.device).expand_as(anchors)
    visibility = Visibility(
        start=anchors - anchor_positions,
        end=anchors,
        own=own,
        keep=keep,
        block_size=block_size,
        num_keys=position_ids.shape[1],
    )
    attention_mask = visibility.tiled() if tiled else visibility.dense()
    return PackedBlocks(block_ids.flatten(1), position_ids, attention_mask)
