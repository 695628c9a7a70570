# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""What a drafter borrows from its target: token embeddings, output head, tapped hidden states and positions.

Shapes: `b` batch, `n` positions, `L` tapped layers, `M` hidden width of the target, `V` vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging, output_capturing

from .configuration_lilicorr import LiLiCorrConfig


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from .modeling_dflash import DFlashModel

logger = logging.get_logger(__name__)

# Up to transformers 5.22 models that are asked for some states leave out their embeddings, and count from elsewhere.
SELECTS_STATES = "selected_hidden_states" in vars(output_capturing)


class TargetTables:
    """The target's embedding and output head, called as the target calls them and never owned by the drafter.

    Args:
        target (`PreTrainedModel`): a causal language model.
    """

    def __init__(self, target: "PreTrainedModel"):
        self.embedding = target.get_input_embeddings()
        self.output_head = target.get_output_embeddings()
        self.config = target.config.get_text_config()
        self.dtype = target.dtype

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings `[*, M]` of token ids `[*]`, with the target's own scaling but without a built-in norm."""
        if isinstance(self.embedding, nn.Embedding) and hasattr(self.embedding, "embed_norm"):
            return nn.Embedding.forward(self.embedding, token_ids)
        return self.embedding(token_ids)

    def logits(self, hidden_states: torch.Tensor, product: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """Logits `[*, V]` of post-norm states `[*, M]`, scaled and soft-capped as the target does.

        Args:
            product (`Callable`): multiplies instead of the output head, as a [`DraftProduct`] does for drafts.
        """
        # A strided 3-D input would send the product down a path that copies the whole head for each row of the batch.
        flat = hidden_states.reshape(-1, hidden_states.shape[-1]).to(self.dtype)
        logits = self.output_head(flat) if product is None else product(self.output_head, flat)
        return rescale_logits(logits, self.config).view(*hidden_states.shape[:-1], -1)


def rescale_logits(logits: torch.Tensor, config: "PreTrainedConfig") -> torch.Tensor:
    """What the target does between its output head and its logits: Cohere's and Granite's scales, Gemma's soft cap."""
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        # HyperCLOVA X keeps a factor under the name that Granite uses for a divisor.
        logits = logits * divisor if config.model_type.startswith("hyperclovax") else logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


def states_to_return(layer_ids: Sequence[int]) -> list[int] | bool:
    """What to ask a target for by `output_hidden_states`, so that [`tapped_states`] finds these layers."""
    return [i + 1 for i in layer_ids] if SELECTS_STATES else True


def tapped_states(
    hidden_states: Sequence[torch.Tensor], layer_ids: Sequence[int], rows: int | None = None
) -> torch.Tensor:
    """Outputs of the tapped decoder layers side by side, `[b, n, L * M]`, of the first `rows` positions or all.

    Args:
        hidden_states (sequence of `torch.Tensor` of shape `[b, n, M]`): the target's, entry 0 being its embeddings.
        layer_ids (sequence of `int`): decoder layers from 0; the output of layer `i` is entry `i + 1`.
    """
    states = [hidden_states[i + 1][:, :rows] for i in layer_ids]
    return torch.cat([state.to(states[0].device) for state in states], dim=-1)


def block_positions(model_kwargs: dict[str, Any], rows: int, seen: int, drafter: "DFlashModel") -> torch.Tensor:
    """Positions `[b, rows + B]` of new context rows and the block after them, on the drafter's device.

    Args:
        model_kwargs (`dict`): the target's, whose `position_ids` are taken where it counts them in one dimension; they
            reach up to the anchor.
        rows (`int`): new context rows, which end before the anchor.
        seen (`int`): context rows before those, in the drafter's cache or out of its window.
    """
    warn_of_length(drafter, seen + rows + drafter.config.block_size)
    positions = model_kwargs.get("position_ids")
    if positions is None or positions.ndim != 2:
        context = torch.arange(seen, seen + rows, device=drafter.device).unsqueeze(0)
    else:
        context = positions[:, -rows - 1 : -1]
    block = torch.arange(1, drafter.config.block_size + 1, device=context.device) + context[:, -1:]
    return torch.cat([context, block], dim=-1).to(drafter.device)


def warn_of_length(drafter: "DFlashModel", length: int) -> None:
    """Says once where a text of `length` tokens leaves the positions that a drafter was made for."""
    config = drafter.config
    scaled = (config.rope_parameters or {}).get("rope_type", "default") != "default"
    if length > config.max_position_embeddings and config.context_window is None and not scaled:
        logger.warning_once(
            f"The text is longer than the {config.max_position_embeddings} positions that {type(drafter).__name__} "
            f"{drafter.name_or_path!r} was made for (`max_position_embeddings`). It stays right, but few drafts may "
            "be accepted: give the assistant a `context_window`, or `rope_parameters` with YaRN."
        )


def check_target(config: LiLiCorrConfig, target: "PreTrainedModel") -> None:
    """Raises before any compute if a drafter with this config cannot draft for `target`.

    Raises:
        `ValueError`: naming what differs, the value on both sides and what to do.
    """
    name = f"{type(target).__name__} {target.name_or_path!r}"
    if target.config.is_encoder_decoder:
        raise ValueError(f"Block drafters need a decoder-only target; {name} is an encoder-decoder model.")
    if target.get_output_embeddings() is None:
        raise ValueError(f"{name} has no output head to borrow; load it with `AutoModelForCausalLM`.")
    text = target.config.get_text_config()
    trained_for = config.target_name_or_path or "another target"
    for what, field, ours, theirs in (
        ("vocabulary", "vocab_size", config.vocab_size, text.vocab_size),
        ("width", "hidden_size", config.hidden_size, text.hidden_size),
        ("number of layers", "num_target_layers", config.num_target_layers, text.num_hidden_layers),
    ):
        if ours != theirs:
            raise ValueError(
                f"The assistant does not fit its target: its {what} (`{field}`) is {ours}, that of {name} is "
                f"{theirs}. The assistant was trained for {trained_for}; load that target, or another "
                "assistant."
            )
    embedding, mask_token_id = target.get_input_embeddings(), require_mask_token(config)
    if isinstance(embedding, nn.Embedding) and mask_token_id >= embedding.num_embeddings:
        raise ValueError(
            f"The assistant's mask token {mask_token_id} has no row in the embedding table of {name}, which has "
            f"{embedding.num_embeddings} rows."
        )


def require_mask_token(config: LiLiCorrConfig) -> int:
    """The mask token, or an error where none was chosen: the pad or eos token would draft too, and badly."""
    if config.mask_token_id is None:
        raise ValueError(
            f"`mask_token_id` is not set: give the id of an unused token among the target's {config.vocab_size} "
            "embedding rows."
        )
    return config.mask_token_id


__all__ = [
    "TargetTables",
    "block_positions",
    "check_target",
    "require_mask_token",
    "rescale_logits",
    "states_to_return",
    "tapped_states",
    "warn_of_length",
]
