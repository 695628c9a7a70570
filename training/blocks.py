# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Many blocks of a sequence packed into one drafter pass.

Shapes: `b` rows, `T` tokens of a row, `N` blocks of a row, `B` block size.
"""

from dataclasses import dataclass

import torch


@dataclass
class PackedBlocks:
    """
    Args:
        input_ids (`torch.LongTensor` of shape `[b, N * B]`): anchor, then masks, of each block.
        position_ids (`torch.LongTensor` of shape `[b, T + N * B]`): of the context rows and the blocks.
        allowed (`torch.BoolTensor` of shape `[b, N * B, T + N * B]`): which context rows and block rows a row sees.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    allowed: torch.Tensor


def pack_blocks(
    input_ids: torch.Tensor,
    document_positions: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    block_size: int,
    mask_token_id: int,
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
    """
    rows, length = input_ids.shape
    num_blocks = anchors.shape[1]
    block_ids = input_ids.new_full((rows, num_blocks, block_size), mask_token_id)
    block_ids[..., 0] = torch.where(keep, input_ids.gather(1, anchors), mask_token_id)

    anchor_positions = document_positions.gather(1, anchors).unsqueeze(-1)
    block_positions = anchor_positions + torch.arange(block_size, device=input_ids.device)
    position_ids = torch.cat([document_positions, block_positions.flatten(1)], dim=1)

    context, anchors = torch.arange(length, device=input_ids.device), anchors.unsqueeze(-1)
    sees_context = (anchors - anchor_positions <= context) & (context < anchors)
    sees_block = torch.eye(num_blocks, dtype=torch.bool, device=input_ids.device).expand(rows, -1, -1)
    allowed = torch.cat([sees_context, sees_block.repeat_interleave(block_size, dim=2)], dim=2)
    allowed = allowed & keep.unsqueeze(-1)
    return PackedBlocks(block_ids.flatten(1), position_ids, allowed.repeat_interleave(block_size, dim=1))
