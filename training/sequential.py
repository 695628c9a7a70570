# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The step's loss for heads that correct a block's slots one after the other: Domino and DSpark.

Shapes: `b` rows, `N` blocks of a row, `n` blocks, `S` slots of a block, `V` vocabulary, `M` hidden width.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lilicorr_hf.modeling.modeling_domino import DominoModel
from lilicorr_hf.modeling.modeling_dspark import DSparkModel
from lilicorr_hf.modeling.modeling_sequential import SequentialDraftModel
from lilicorr_hf.modeling.target_lilicorr import TargetTables

from . import losses
from .step import (
    Objective,
    Share,
    SlotLabels,
    StepLoss,
    TrainingBatch,
    drafter_total,
    drafter_weights,
    in_chunks,
    note_prefixes,
    slot_states,
)


# Of DSpark's terms, as published.
DSPARK_WEIGHTS = {"cross_entropy": 0.1, "distance": 0.9, "confidence": 1.0}


@dataclass
class SequentialPredictions:
    """What drafter and head say of every slot given the true tokens before it, `[n, S]` each.

    Args:
        cross_entropy (`torch.Tensor`): of the ground truth under the corrected logits.
        base_cross_entropy (`torch.Tensor`): under the drafter's own.
        distance (`torch.Tensor`): sum over the vocabulary of how far the corrected distribution is from the target's;
            0 where that was not asked for.
        confidence (`torch.Tensor`): logit of the slot's acceptance; 0 for heads that state none.
        hit, base_hit (`torch.BoolTensor`): whether the ground truth is the most probable token.
    """

    cross_entropy: torch.Tensor
    base_cross_entropy: torch.Tensor
    distance: torch.Tensor
    confidence: torch.Tensor
    hit: torch.Tensor
    base_hit: torch.Tensor


def predict_in_sequence(
    model: SequentialDraftModel,
    tables: TargetTables,
    hidden: torch.Tensor,
    previous_ids: torch.Tensor,
    label_ids: torch.Tensor,
    final_states: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The fields of [`SequentialPredictions`] of some blocks.

    Args:
        hidden (`torch.Tensor` of shape `[n, S, M]`): the drafter's states of the slots.
        previous_ids, label_ids (`torch.LongTensor` of shape `[n, S]`): the true token before and at each slot.
        final_states (`torch.Tensor` of shape `[n, S, M]`): the target's, that predict each slot.
    """
    base = tables.logits(hidden)
    if isinstance(model, DominoModel):
        embeds = tables.embed(previous_ids).detach().to(model.dtype)
        logits = model.corrected_logits(base, hidden, embeds)
        confidence = distance = torch.zeros(label_ids.shape, device=hidden.device)
    else:
        assert isinstance(model, DSparkModel)
        logits, confidence = model.corrected_logits(base, hidden, previous_ids)
        with torch.no_grad():
            wanted = tables.logits(final_states).softmax(dim=-1, dtype=torch.float32)
        distance = (logits.softmax(dim=-1, dtype=torch.float32) - wanted).abs().sum(dim=-1)
    labels = label_ids.unsqueeze(-1)
    return (
        -losses.token_log_probs(logits, labels).squeeze(-1),
        -losses.token_log_probs(base, labels).squeeze(-1),
        distance,
        confidence.float(),
        logits.detach().argmax(dim=-1) == label_ids,
        base.detach().argmax(dim=-1) == label_ids,
    )


def domino_loss(
    predictions: SequentialPredictions, weights: torch.Tensor, base_share: float, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Domino's base-anchored curriculum: the drafter's own cross-entropy first, the corrected one in the end.

    Args:
        weights (`torch.Tensor` of shape `[n, S]`): of the slots, 0 where nothing is supervised.
        base_share (`float`): of the drafter's own term; falls from 1 to 0 over the run.
        total (`torch.Tensor` of shape `[]`): sum of the weights of the whole step, if this is a part of it.
    """
    final = losses.block_loss(predictions.cross_entropy, weights, total)
    return (1 - base_share) * final + base_share * losses.block_loss(predictions.base_cross_entropy, weights, total)


def dspark_terms(
    predictions: SequentialPredictions, weights: torch.Tensor, total: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """DSpark's three terms, not yet weighted: cross-entropy, distance to the target's distribution, and how well the
    confidence knows the share of drafts that the target would accept, `1 - distance / 2`."""
    accepted = (1 - predictions.distance.detach() / 2).clamp(0, 1)
    # Autocast refuses the plain form; its logits are in fp32 here.
    known = F.binary_cross_entropy_with_logits(predictions.confidence, accepted, reduction="none")
    terms = {"cross_entropy": predictions.cross_entropy, "distance": predictions.distance, "confidence": known}
    return {name: losses.block_loss(term, weights, total) for name, term in terms.items()}


def sequential_loss(
    model: SequentialDraftModel,
    tables: TargetTables,
    batch: TrainingBatch,
    objective: Objective,
    share: Share,
    labels: SlotLabels,
    hidden: torch.Tensor,
    chunk_size: int,
    progress: float,
) -> StepLoss:
    """Loss of a step for heads that correct slots in order, given the drafter's states `[b, N, S, M]`."""
    slots = hidden.shape[2]
    # What a slot follows: the anchor, then the true tokens.
    positions = batch.anchors.unsqueeze(-1) + torch.arange(slots, device=hidden.device)
    before = batch.input_ids.gather(1, positions.clamp(max=batch.input_ids.shape[1] - 1).flatten(1))
    previous_ids = before.view_as(labels.ids)
    inputs = (hidden, previous_ids, labels.ids, slot_states(batch, slots))

    def one_chunk(*given):
        return predict_in_sequence(model, tables, *given)

    found = in_chunks(one_chunk, max(chunk_size // slots, 1), *(tensor.flatten(0, 1) for tensor in inputs))
    predictions = SequentialPredictions(*(tensor.view(labels.ids.shape) for tensor in found))
    # A slot counts as far as the block is supervised without a gap.
    reached = labels.supervised.cumprod(dim=-1) > 0
    weights = drafter_weights(objective, reached, predictions.cross_entropy)
    total, scale = drafter_total(share, weights)
    step = StepLoss(torch.zeros((), device=hidden.device))
    if isinstance(model, DominoModel):
        step.loss = domino_loss(predictions, weights, 1.0 - progress, total) * scale
        step.parts["final"] = losses.block_loss(predictions.cross_entropy, weights).detach()
    else:
        terms = dspark_terms(predictions, weights, total)
        step.loss = sum((DSPARK_WEIGHTS[name] * term for name, term in terms.items()), step.loss) * scale
        step.parts |= {name: term.detach() * scale for name, term in terms.items()}
    step.parts["dflash"] = losses.block_loss(predictions.base_cross_entropy, weights).detach()
    hits = {"top1": predictions.base_hit, "selected": predictions.hit}
    note_prefixes(step, hits, labels.supervised.all(dim=-1))
    return step
