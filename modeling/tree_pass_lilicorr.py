# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""One pass of the target over a tree of drafted tokens, after which it looks like a pass over the accepted ones.

Shapes: `b` rows, `n` nodes of a tree, `V` vocabulary. A pass reads `n + 1` tokens at places 0 to `n`: the anchor, then
the nodes. `p` positions of the text before them are cached, called columns.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from .cache_lilicorr import CACHE


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .modeling_dflash import DFlashModel

# Attention that takes any mask.
MASKED_ATTENTION = ("sdpa", "eager")
LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass
class DraftTree:
    """
    Tokens drafted as a tree.

    Args:
        token_ids (`torch.LongTensor` of shape `[b, n]`): parents before their children.
        parents (`torch.LongTensor` of shape `[b, n]`): index of each token's predecessor, -1 for the anchor.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor

    def child(self, place: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Places `[b]` of `tokens [b]` after those at `place [b]`; 0, where none is drafted after any, for nowhere."""
        found = (self.parents + 1 == place.unsqueeze(-1)) & (self.token_ids == tokens.unsqueeze(-1))
        return (found.int().argmax(dim=-1) + 1) * found.any(dim=-1)

    def reach(self, tokens: torch.Tensor) -> torch.Tensor:
        """How many of the tokens `[b, s]`, from the first on, are a path in the tree, `[b]`."""
        place = tokens.new_zeros(len(tokens))
        reached, going = place, place == 0
        for token in tokens.unbind(dim=1):
            place = self.child(place, token)
            going = going & (place > 0)
            reached = reached + going
        return reached

    def paths(self) -> torch.Tensor:
        """Whether place `j` is `i` or before it on its path, at `[b, i, j]` of `[b, n + 1, n + 1]`."""
        rows, nodes = self.parents.shape
        reach = torch.eye(nodes + 1, device=self.parents.device).repeat(rows, 1, 1)
        reach[:, 1:].scatter_(2, self.parents.unsqueeze(-1) + 1, 1.0)
        # Each product doubles how far up a path is known.
        for _ in range(nodes.bit_length()):
            reach = (reach @ reach).clamp(max=1)
        return reach.bool()


def default_tree_budget(drafter: "DFlashModel", target: "PreTrainedModel", model_kwargs: dict[str, Any]) -> int:
    """Tokens of a tree where nobody has asked for any number: those of a chain, of which more are accepted then.

    On CPUs alone, where what a tree costs besides is little beside a pass; 0 where no tree can be had.
    """
    config = drafter.config
    possible = target.device.type == "cpu" and drafter.drafts_trees and not config.sampled_walk
    return config.num_slots if possible and why_no_tree(target, model_kwargs) is None else 0


def check_tree_target(drafter: "DFlashModel", target: "PreTrainedModel", model_kwargs: dict[str, Any]) -> None:
    """Raises `ValueError`, before any compute, for a drafter that drafts no trees, and for a target or a cache that
    cannot verify one.

    Args:
        drafter ([`DFlashModel`]).
        target (`PreTrainedModel`): its attention has to take a mask and positions from outside.
        model_kwargs (`dict`): its forward arguments, its cache among them.
    """
    if not drafter.drafts_trees:
        raise ValueError(
            f"{type(drafter).__name__} drafts chains alone: its head would have to be asked for every node of a tree. "
            "Set `tree_budget` to 0."
        )
    if (reason := why_no_tree(target, model_kwargs)) is not None:
        raise ValueError(
            f"{type(target).__name__} {target.name_or_path!r} cannot verify trees here: {reason}. `tree_budget=0` "
            "drafts chains, which it can."
        )


def why_no_tree(target: "PreTrainedModel", model_kwargs: dict[str, Any]) -> str | None:
    """What keeps a target from verifying a tree; `None` if nothing does. Arguments as in [`check_tree_target`]."""
    config, positions, cache = target.config.get_text_config(), model_kwargs.get("position_ids"), model_kwargs[CACHE]
    kinds = {type(layer) for layer in cache.layers}
    if (attention := config._attn_implementation) not in MASKED_ATTENTION:
        return f"its attention is {attention!r}, which takes no mask of a tree; load it with 'sdpa' or 'eager'"
    if positions is None or positions.ndim != 2 or getattr(config, "alibi", False):
        return "it does not take a number for the position of a token"
    if not layer_windows(config).keys() <= LAYER_TYPES or hasattr(target, "create_masks_for_generate"):
        return f"it prepares masks of its own for layers of {sorted(layer_windows(config))}"
    if "local" in getattr(config, "attention_layers", ()):
        return "its local attention counts positions by where they lie in the cache"
    if cache.offloading or not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        return f"tokens cannot be moved in its cache of {found}; use the default, `cache_implementation='dynamic'`"
    return None


def why_no_mask(cache: Cache, attention_mask: torch.Tensor | None) -> str | None:
    """What keeps a text, once its prompt is read, from being part of a tree's mask; `None` if nothing does.

    Args:
        attention_mask (`torch.Tensor` of shape `[b, p + 1]`): of the next pass, over one token.
    """
    cached = cache.get_seq_length()
    if attention_mask is None or attention_mask.shape[1] == cached + 1:
        return None
    return (
        f"The cache holds {cached} positions and the text has {attention_mask.shape[1] - 1}: tokens that only the "
        "target knows of, as prefix tuning adds, cannot be part of a tree's mask. Draft chains (`tree_budget=0`)."
    )


def layer_windows(config: Any) -> dict[str, int | None]:
    """The kinds of layers of a target, with their windows; by the rule transformers prepares masks by."""
    window = getattr(config, "sliding_window", None)
    if not hasattr(config, "layer_types"):
        chunks = getattr(config, "attention_chunk_size", None)
        return {"sliding_attention" if window else "chunked_attention" if chunks else "full_attention": window}
    return {kind: window if kind == "sliding_attention" else None for kind in config.layer_types}


def tree_inputs(target: Any, inputs: dict[str, Any], tree: DraftTree) -> dict[str, Any]:
    """The target's forward arguments for a pass over a tree, given those for the same tokens as a chain."""
    paths, cache, config = tree.paths(), inputs[CACHE], target.config.get_text_config()
    rows, places, _ = paths.shape
    padding = inputs.get("attention_mask")
    padding = paths.new_ones(rows, cache.get_seq_length()) if padding is None else padding[:, :-places].bool()
    depth = paths.sum(dim=-1) - 1
    masks = {}
    for kind, window in layer_windows(config).items():
        layer = config.layer_types.index(kind) if hasattr(config, "layer_types") else 0
        mask = tree_mask(paths, depth, padding, cache.get_mask_sizes(places, layer)[1], window)
        if config._attn_implementation == "eager":
            least = torch.finfo(target.dtype).min
            mask = torch.zeros_like(mask, dtype=target.dtype).masked_fill(~mask, least)
        masks[kind] = mask
    attention_mask = masks if hasattr(config, "layer_types") else next(iter(masks.values()))
    return inputs | {"attention_mask": attention_mask, "position_ids": inputs["position_ids"][:, :1] + depth}


def tree_mask(
    paths: torch.Tensor, depth: torch.Tensor, padding: torch.Tensor, first: int, window: int | None
) -> torch.Tensor:
    """Which cached columns from `first` on, and which places, each place may look at.

    Args:
        paths (`torch.BoolTensor` of shape `[b, n + 1, n + 1]`), depth (`torch.LongTensor` of shape `[b, n + 1]`).
        padding (`torch.BoolTensor` of shape `[b, p]`): `False` at columns that hold padding.
        window (`int`): how far back a place sees, itself included; `None` for all the way.

    Returns:
        `torch.BoolTensor` of shape `[b, 1, n + 1, p - first + n + 1]`.
    """
    rows, places, _ = paths.shape
    seen = padding[:, first:].unsqueeze(1).expand(-1, places, -1)
    mask = torch.cat([seen, paths], dim=-1)
    if window is not None:
        cached = padding.shape[1]
        columns = torch.arange(first, cached, device=depth.device).expand(rows, -1)
        columns = torch.cat([columns, cached + depth], dim=-1)
        mask = mask & (cached + depth.unsqueeze(-1) - columns.unsqueeze(1) < window)
    return mask.unsqueeze(1)


def move_to_front(cache: Cache, places: int, path: torch.Tensor) -> None:
    """Puts the places of `path [b, m]`, of the last pass's `places`, before the others of them in the cache."""
    layer: Any
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        index = path[:, None, :, None].to(layer.keys.device)
        for states in (layer.keys, layer.values):
            last = states[..., -places:, :]
            last[..., : path.shape[1], :] = last.take_along_dim(index, dim=2)


def keep_path(outputs: Any, path: torch.Tensor) -> None:
    """Cuts states and attentions of a pass over a tree down to those of the places of `path [b, m]`."""

    def states_of(layer: torch.Tensor) -> torch.Tensor:
        return layer.take_along_dim(path.unsqueeze(-1).to(layer.device), dim=1)

    def weights_of(layer: torch.Tensor) -> torch.Tensor:
        cached = layer.shape[3] - layer.shape[2]
        columns = torch.arange(cached, device=path.device).expand(len(path), -1)
        columns = torch.cat([columns, cached + path], dim=-1).to(layer.device)
        rows = layer.take_along_dim(path[:, None, :, None].to(layer.device), dim=2)
        return rows.take_along_dim(columns[:, None, None], dim=3)

    for name, take in (("hidden_states", states_of), ("attentions", weights_of)):
        if (layers := outputs.get(name)) is not None:
            outputs[name] = tuple(None if layer is None else take(layer) for layer in layers)


__all__ = [
    "DraftTree",
    "check_tree_target",
    "default_tree_budget",
    "keep_path",
    "move_to_front",
    "tree_inputs",
    "why_no_mask",
]
