# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Layers of the block drafter, whose attention reads context rows and the whole block (DFlash, section 3).

Shapes: `b` batch, `n` rows, `M` hidden width, `d` head dimension.
"""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import DFlashCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    eager_attention_forward,
    rotate_half,
)

from .configuration_lilicorr import LiLiCorrConfig
from .convolution_lilicorr import BlockConvolution


def attention_implementation(attention_mask: torch.Tensor | BlockMask | None, configured: str) -> str:
    """The configured one, unless a mask of packed blocks can be applied by one alone: a `BlockMask` by flex attention,
    a boolean mask `[b, 1, q, k]` by SDPA."""
    if isinstance(attention_mask, BlockMask):
        return "flex_attention"
    if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.dtype == torch.bool:
        return "sdpa"
    return configured


class DFlashAttention(Qwen3Attention):
    """Queries from the block; keys and values from the new context rows, then the block (DFlash, section 3)."""

    def __init__(self, config: LiLiCorrConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: DFlashCache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        # Queries are the last rows of the positions that keys span.
        cos, sin = (x[..., -query.shape[-2] :, :].unsqueeze(1) for x in position_embeddings)
        query = query * cos + rotate_half(query) * sin
        rows = torch.cat([context_hidden_states, hidden_states], dim=1)
        key, value = self.keys_and_values(rows, position_embeddings)
        query = query.to(value.dtype)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        implementation = attention_implementation(attention_mask, self.config._attn_implementation)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, is_causal=False, **kwargs
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def keys_and_values(
        self, rows: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[b, heads, n, d]` of context rows or rows of the block `[b, n, M]`."""
        heads = (-1, self.head_dim)
        key = self.k_norm(self.k_proj(rows).unflatten(-1, heads)).transpose(1, 2)
        value = self.v_proj(rows).unflatten(-1, heads).transpose(1, 2)
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        key = key * cos + rotate_half(key) * sin
        # Under autocast the norms leave keys in fp32, which not every kernel takes beside values in bf16.
        return key.to(value.dtype), value


class DFlashDecoderLayer(Qwen3DecoderLayer):
    """A decoder layer of the block; with `conv_kernel_size`, each sublayer stands between two convolutions."""

    def __init__(self, config: LiLiCorrConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DFlashAttention(config, layer_idx)
        convolved = config.conv_kernel_size > 0
        self.attention_conv = BlockConvolution(config) if convolved else None
        self.mlp_conv = BlockConvolution(config) if convolved else None

    def forward(self, hidden_states: torch.Tensor, block_size: int | None = None, **kwargs: Any) -> torch.Tensor:
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(hidden_states, **kwargs)
        normed = self.input_layernorm(hidden_states)
        before, after = self.attention_conv(normed, block_size)
        hidden_states = hidden_states + after(self.self_attn(hidden_states=before(normed), **kwargs)[0])
        normed = self.post_attention_layernorm(hidden_states)
        before, after = self.mlp_conv(normed, block_size)
        return hidden_states + after(self.mlp(before(normed)))


__all__ = ["DFlashAttention", "DFlashDecoderLayer"]
