# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""What the decoding loop asks of a target's cache: take columns back, and move rows of a batch against each other.

Shapes: `b` rows, `n` cached positions, called columns, of which a layer with a window holds the last ones only.
"""

import math
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput


# What models and `generate` call their cache: `past_key_values` before transformers 5.24.
CACHE = next(name for name in ("cache", "past_key_values") if name in GenerateDecoderOnlyOutput.__dataclass_fields__)


def check_cache(cache: Cache | None, before_prefill: bool) -> None:
    """Raises `ValueError` for a cache that cannot give up what the target rejects.

    Args:
        cache (`Cache`): the target's.
        before_prefill (`bool`): leave out layers of linear attention, which only know once they hold something.
    """
    if cache is None:
        raise ValueError("Assisted decoding needs the target's cache: leave out `use_cache=False`.")
    for layer in cache.layers:
        undecided = before_prefill and isinstance(layer, LinearAttentionCacheLayerMixin)
        if not undecided and not layer.is_croppable:
            raise ValueError(
                f"{type(cache).__name__} cannot take rejected tokens back: its {type(layer).__name__} does not keep "
                "what they replace. Use the default cache (`cache_implementation='dynamic'`), or no `assistant_model`."
            )


def columns_left(cache: Cache) -> float:
    """How many more columns fit into a cache; infinity if its layers grow."""
    layers = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    return min((layer.max_cache_len - int(layer.get_seq_length()) for layer in layers), default=math.inf)


def rows_can_be_moved(cache: Cache) -> bool:
    """Whether [`select_columns`] serves all layers, and nobody will see what it did to them."""
    kinds = {DynamicLayer, DynamicSlidingWindowLayer}
    # `generate` marks a cache that the caller handed in.
    return (
        not cache.offloading and not getattr(cache, "_is_user_defined", False) and {*map(type, cache.layers)} <= kinds
    )


def select_columns(layer: Any, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Keeps `columns [b', n']` of `rows [b']` of a `CacheLayerMixin`, which then holds `n'` columns of `b'` rows."""
    if not layer.is_initialized:
        return
    missing = layer.get_seq_length() - layer.keys.shape[-2]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = columns.shape[1]
        columns = columns[:, -layer.sliding_window + 1 :]
    index = (columns - missing).clamp(min=0).to(layer.keys.device)
    rows = rows.to(layer.keys.device).unsqueeze(-1)
    layer.keys, layer.values = (
        states.transpose(1, 2)[rows, index].transpose(1, 2) for states in (layer.keys, layer.values)
    )


def stop_recording_past(cache: Cache) -> None:
    """Undoes `activate_past_recording`: whoever goes on with the cache would have a window's past pile up."""
    for layer in cache.layers:
        if isinstance(layer, (DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin)):
            layer.record_past = False


__all__ = ["CACHE", "check_cache", "columns_left", "rows_can_be_moved", "select_columns", "stop_recording_past"]
