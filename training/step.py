# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""What the losses of all draft methods are made of: a step's batch, its labels and weights, its share of a whole.

Shapes: `b` rows, `T` tokens of a row, `N` blocks of a row, `S` slots of a block, `V` vocabulary, `M` hidden width, `L`
tapped layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch.utils.checkpoint import checkpoint

from . import losses


SlotWeights = Literal["decay", "dpace", "uniform"]


@dataclass
class Objective:
    """Weights of the loss terms; the defaults are the paper's base recipe, `margin` its long-context one.

    Args:
        cross_entropy, distractor, hinge (`float`): weights of the head's terms, equations 3, 5 and appendix G.
        margin (`float`): lead that the hinge asks for.
        slot_weights (`str`): of the drafter's term: `decay` (DFlash), `dpace`, or `uniform`.
        beta (`float`): decay in slots; 7 for blocks of 16, 4 for blocks of 8.
        dpace_alpha (`float`): smoothing of D-PACE.
        distillation (`float`): share of the drafter's term that follows the target's distribution at each slot
            (Kullback-Leibler divergence) instead of the token it chose; 0 in the paper.

    Raises:
        `ValueError`: for `slot_weights` that do not exist.
    """

    cross_entropy: float = 0.25
    distractor: float = 0.25
    hinge: float = 0.0
    margin: float = 2.0
    slot_weights: SlotWeights = "decay"
    beta: float = 7.0
    dpace_alpha: float = 0.5
    distillation: float = 0.0

    def __post_init__(self) -> None:
        if self.slot_weights not in get_args(SlotWeights):
            raise ValueError(
                f"There are no `slot_weights` {self.slot_weights!r}; take one of {get_args(SlotWeights)}."
            )

    @classmethod
    def with_margin(cls, **changes) -> "Objective":
        """The paper's variant for inputs longer than the training text (appendix G)."""
        return cls(cross_entropy=0.125, hinge=0.125, **changes)


@dataclass
class TrainingBatch:
    """What a step trains on, the frozen target's part included.

    Args:
        input_ids (`torch.LongTensor` of shape `[b, T]`).
        loss_mask (`torch.Tensor` of shape `[b, T]`): 1 at tokens the target wrote.
        position_ids (`torch.LongTensor` of shape `[b, T]`): of each token in its document; a row may hold several.
        anchors (`torch.LongTensor` of shape `[b, N]`): index of each block's first token in its row.
        keep (`torch.BoolTensor` of shape `[b, N]`): `False` for blocks that only fill the tensor.
        target_states (`torch.Tensor` of shape `[b, T, L * M]`): tapped states of the target.
        final_states (`torch.Tensor` of shape `[b, T, M]`): what its output head reads, after the final norm.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    anchors: torch.Tensor
    keep: torch.Tensor
    target_states: torch.Tensor
    final_states: torch.Tensor


@dataclass
class Share:
    """What part of an optimizer step a micro-batch on one process is.

    Gradients are averaged over processes and summed over micro-batches, so a mean over the step's slots needs both
    known. The drafter's weights are known before the step, unless they depend on its losses (D-PACE).
    How many slots teach the head shows only when its candidates are known: that count is reduced over processes, and
    each micro-batch contributes the mean over its own.

    Args:
        weight_total (`torch.Tensor` of shape `[]`): the drafter's slot weights of the whole step; `None` if not known.
        micro_batches (`int`): micro-batches of the step on each process.
        processes (`int`): processes that train together.
        reduce (`Callable`): sum of a scalar over processes.
    """

    weight_total: torch.Tensor | None = None
    micro_batches: int = 1
    processes: int = 1
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda value: value


@dataclass
class StepLoss:
    """The loss to minimise, the means of its parts over this micro-batch, and what to watch; scalars, only `loss` with
    a graph."""

    loss: torch.Tensor
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class SlotLabels:
    """Ground truth of every slot: ids `[b, N, S]`, and which of them count, `[b, N, S]`."""

    ids: torch.Tensor
    supervised: torch.Tensor


def slot_labels(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    anchors: torch.Tensor,
    keep: torch.Tensor,
    num_slots: int,
) -> SlotLabels:
    """Slot `s` predicts the token at anchor + 1 + s; it counts inside the document where the target wrote it.

    Arguments as in [`TrainingBatch`].
    """
    offsets = torch.arange(1, num_slots + 1, device=anchors.device)
    indices = (anchors.unsqueeze(-1) + offsets).clamp(max=input_ids.shape[1] - 1)

    def at_slots(values):
        return values.gather(1, indices.flatten(1)).view_as(indices)

    # Behind the end of the document, or of the row, positions are lower than the block's.
    inside = at_slots(position_ids) == position_ids.gather(1, anchors).unsqueeze(-1) + offsets
    return SlotLabels(at_slots(input_ids), inside & (at_slots(loss_mask) > 0) & keep.unsqueeze(-1))


def slot_states(batch: TrainingBatch, num_slots: int) -> torch.Tensor:
    """The target's final states `[b, N, S, M]` that predict each slot; slot `s` is predicted at anchor + `s`."""
    positions = batch.anchors.unsqueeze(-1) + torch.arange(num_slots, device=batch.anchors.device)
    flat = positions.clamp(max=batch.final_states.shape[1] - 1).flatten(1).unsqueeze(-1)
    states = batch.final_states.gather(1, flat.expand(-1, -1, batch.final_states.shape[-1]))
    return states.unflatten(1, positions.shape[1:])


def drafter_weights(objective: Objective, supervised: torch.Tensor, cross_entropy: torch.Tensor) -> torch.Tensor:
    """Weights `[b, N, S]` of the drafter's cross-entropies, 0 where nothing is supervised."""
    if objective.slot_weights == "dpace":
        return losses.dpace_weights(cross_entropy, supervised, objective.dpace_alpha) * supervised
    return fixed_weights(objective, supervised)


def fixed_weights(objective: Objective, supervised: torch.Tensor) -> torch.Tensor:
    """Those weights where they do not depend on the losses; `supervised` has shape `[b, N, S]`."""
    if objective.slot_weights == "uniform":
        return supervised.float()
    return losses.decay_weights(supervised.shape[-1], objective.beta, supervised.device) * supervised


def drafter_total(share: Share, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """What a sum over this micro-batch's slots is divided by, and the factor that makes it a share of the step."""
    parts = 1 if share.weight_total is not None else share.micro_batches
    total = share.reduce(weights.sum()) if share.weight_total is None else share.weight_total
    return total, share.processes / parts


def in_chunks(
    function: Callable[..., tuple[torch.Tensor, ...]], size: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """A function of rows on `size` rows at a time: what it computes on the way exists for one chunk only, and again in
    the backward pass. Rows that fit into one chunk are not computed twice.

    Args:
        function (`Callable`): from tensors to tensors, each row on its own.
        size (`int`): rows of a chunk.
        tensors (`torch.Tensor` of shape `[n, *]`).
    """
    if len(tensors[0]) <= size:
        return function(*tensors)
    chunks = zip(*(tensor.split(size) for tensor in tensors), strict=True)
    outputs = [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def note_prefixes(step: StepLoss, hits: dict[str, torch.Tensor], complete: torch.Tensor) -> None:
    """Adds to a step's metrics how many slots each way to draft would have accepted: means over complete blocks.

    Args:
        step ([`StepLoss`]): changed in place.
        hits (`dict` of `torch.BoolTensor` of shape `[b, N, S]`): by the way's name, where it is right.
        complete (`torch.BoolTensor` of shape `[b, N]`): blocks that are supervised whole.
    """
    for name, hit in hits.items():
        step.metrics[f"{name}_prefix"] = masked_mean(losses.prefix_length(hit), complete)
    step.metrics["complete_blocks"] = complete.sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values.float() * mask).sum() / mask.sum().clamp(min=1)
