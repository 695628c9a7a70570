# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""A drafter that starts as its target's last layers instead of noise, which saves most of the early training, and a
head that starts with an eye for tokens.

Shapes: `n` tokens, `M` hidden width, `L` tapped layers, `d` head dimension.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lilicorr_hf.modeling.modeling_dflash import DFlashModel
from lilicorr_hf.modeling.modeling_lilicorr import LiLiCorrDraftModel, LiLiCorrHead
from lilicorr_hf.modeling.target_lilicorr import TargetTables


def warm_start(model: DFlashModel, new: Container[str], target: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Starts what no checkpoint brought: the drafter from the target's layers, the head balanced.

    Args:
        model ([`DFlashModel`]): changed in place.
        new (container of `str`): names of its tensors that are new.
        target, input_ids: as in [`start_from_target`].
    """
    if "fc.weight" in new:
        start_from_target(model, target, input_ids)
    if isinstance(model, LiLiCorrDraftModel) and "lilicorr.out_head.weight" in new:
        embeddings = TargetTables(target).embed(torch.arange(model.config.vocab_size, device=target.device))
        balance_head(model.lilicorr, embeddings, model.norm.weight)


@torch.no_grad()
def start_from_target(drafter: DFlashModel, target: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Copies the target's last decoder layers into the drafter and makes its context look like what they read.

    `fc` passes the last tapped state through and `hidden_norm` normalises it like the layer after the first copied one
    would; the drafter's query and key norms, which most targets lack, take the size of the target's own projections.

    Args:
        drafter ([`DFlashModel`]): changed in place.
        target (`PreTrainedModel`): Llama-like, with the drafter's head count, head dimension and MLP width.
        input_ids (`torch.LongTensor` of shape `[1, n]`): text to measure those projections on; a few hundred tokens.

    Raises:
        `ValueError`: naming the first tensor whose shape differs.
    """
    config = drafter.config
    decoder: Any = target.base_model
    first = len(decoder.layers) - config.num_hidden_layers
    hidden = decoder(input_ids=input_ids, output_hidden_states=True).hidden_states
    for i in range(config.num_hidden_layers):
        layer: Any = drafter.layers[i]
        source = decoder.layers[first + i]
        for name in ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            copy_weight(layer.get_submodule(name), source.get_submodule(name), name)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            copy_weight(getattr(layer.self_attn, name), getattr(source.self_attn, name), name)
        states = source.input_layernorm(hidden[first + i])
        for name in ("q", "k"):
            projected = getattr(source.self_attn, f"{name}_proj")(states).unflatten(-1, (-1, config.head_dim))
            norm = getattr(layer.self_attn, f"{name}_norm")
            norm.weight.copy_(projected.float().pow(2).mean(dim=(0, 1, 2)).sqrt())
    copy_weight(drafter.norm, decoder.norm, "norm")
    following = decoder.layers[min(first + 1, len(decoder.layers) - 1)]
    copy_weight(drafter.hidden_norm, following.input_layernorm, "hidden_norm")
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -config.hidden_size :].copy_(torch.eye(config.hidden_size))


@torch.no_grad()
def balance_head(head: LiLiCorrHead, embeddings: torch.Tensor, state_scale: torch.Tensor) -> None:
    """Lets a candidate's token and its slot's state enter a new head at the same size, 1.

    The usual start, every weight from N(0, 0.02), leaves the token at a few percent of the state, the same for all
    candidates of a slot: the head then learns the drafter's rank first, and pairs of tokens late. Vectors whose cosine
    is the score start at the size of what they are made from.

    Args:
        head ([`LiLiCorrHead`]): changed in place.
        embeddings (`torch.Tensor` of shape `[V, M]`): the target's, as it calls them.
        state_scale (`torch.Tensor` of shape `[M]`): weight of the norm that slot states leave the drafter through.
    """
    if isinstance(head.token_proj, nn.Linear):
        spread(head.token_proj, embeddings)
    spread(head.pass_hidden_proj, state_scale)
    for linear in (head.factor_input_proj, head.out_head, head.in_head, head.anchor_out_head):
        spread(linear, torch.ones(1))


def spread(linear: nn.Linear, inputs: torch.Tensor) -> None:
    """Draws the weights anew so that inputs of this root mean square leave at 1."""
    size = inputs.float().pow(2).mean().sqrt().item()
    linear.weight.normal_(0.0, linear.in_features**-0.5 / size)


def copy_weight(module: Any, source: Any, name: str) -> None:
    if module.weight.shape != source.weight.shape:
        raise ValueError(
            f"Cannot start from the target: its {name} is {list(source.weight.shape)}, the drafter's is "
            f"{list(module.weight.shape)}. Give the drafter the target's head count, head dimension and MLP width."
        )
    module.weight.copy_(source.weight)
