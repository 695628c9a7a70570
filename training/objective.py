# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""One training step's loss: the drafter on packed blocks, the head on the lattices it produces.

Shapes: `b` rows, `T` tokens of a row, `N` blocks of a row, `B` block size, `S = B - 1` slots, `K` candidates of a
slot, `V` vocabulary, `M` hidden width, `L` tapped layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lilicorr_hf.modeling.lattice_lilicorr import greedy_walk
from lilicorr_hf.modeling.modeling_dflash import DFlashModel, DFlashOutput
from lilicorr_hf.modeling.modeling_dflash2 import DFlash2Model
from lilicorr_hf.modeling.modeling_lattice import LatticeDraftModel
from lilicorr_hf.modeling.modeling_lilicorr import LiLiCorrDraftModel
from lilicorr_hf.modeling.modeling_sequential import SequentialDraftModel
from lilicorr_hf.modeling.target_lilicorr import TargetTables

from . import losses
from .blocks import pack_blocks
from .sequential import sequential_loss
from .stages import StageClock
from .step import (
    Objective,
    Share,
    StepLoss,
    TrainingBatch,
    drafter_total,
    drafter_weights,
    in_chunks,
    masked_mean,
    note_prefixes,
    slot_labels,
    slot_states,
)
from .vocabulary import DrawnVocabulary, Vocabulary, candidate_logits


@dataclass
class SlotPredictions:
    """The drafter's view of every slot, with gradients to its states.

    Args:
        cross_entropy (`torch.Tensor` of shape `[n]`): of the ground truth.
        candidate_ids (`torch.LongTensor` of shape `[n, K]`), log_probs (`torch.Tensor` of shape `[n, K]`): the pool.
        divergence (`torch.Tensor` of shape `[n]`): from the target's distribution; 0 where that was not given.
    """

    cross_entropy: torch.Tensor
    candidate_ids: torch.Tensor
    log_probs: torch.Tensor
    divergence: torch.Tensor


@dataclass
class Lattices:
    """What a step's blocks hold for the head to score.

    Args:
        candidate_ids (`torch.LongTensor` of shape `[b, N, S, K]`), log_probs (`torch.Tensor` of shape `[b, N, S, K]`).
        hidden (`torch.Tensor` of shape `[b, N, S, M]`): the drafter's states of the slots.
        context (`torch.Tensor` of shape `[b, T, M]`): its projected context rows.
        truth_index (`torch.LongTensor` of shape `[b, N, S]`): the ground truth's candidate, -1 where it is none.
        complete (`torch.BoolTensor` of shape `[b, N]`): blocks that are supervised whole.
    """

    candidate_ids: torch.Tensor
    log_probs: torch.Tensor
    hidden: torch.Tensor
    context: torch.Tensor
    truth_index: torch.Tensor
    complete: torch.Tensor

    @property
    def supervised(self) -> torch.Tensor:
        """Slots `[b, N, S]` that teach the head."""
        return losses.oracle_prefix(self.truth_index, self.complete)


def predict_slots(
    hidden: torch.Tensor,
    label_ids: torch.Tensor,
    tables: TargetTables,
    k: int,
    chunk_size: int,
    vocabulary: DrawnVocabulary | None = None,
    final_states: torch.Tensor | None = None,
) -> SlotPredictions:
    """Runs the output head over slot states.

    Args:
        hidden (`torch.Tensor` of shape `[n, M]`): post-norm states of the slots.
        label_ids (`torch.LongTensor` of shape `[n]`).
        tables ([`TargetTables`]): the target's output head.
        k (`int`): candidates to keep.
        chunk_size (`int`): slots at a time; see [`in_chunks`].
        vocabulary ([`DrawnVocabulary`]): the tokens that compete; `None` for all.
        final_states (`torch.Tensor` of shape `[n, M]`): the target's at the slots, to compare distributions.
    """

    def head(states):
        return tables.logits(states) if vocabulary is None else vocabulary.logits(tables, states)

    def one_chunk(states, labels, target_states=None):
        logits = head(states)
        unweighted = logits.detach() if vocabulary is None else logits.detach() - vocabulary.log_weights
        top = unweighted.topk(k, dim=-1).indices
        index = labels if vocabulary is None else vocabulary.index[labels]
        log_probs = losses.token_log_probs(logits, torch.cat([index.unsqueeze(-1), top], dim=-1))
        divergence = torch.zeros_like(log_probs[:, 0])
        if target_states is not None:
            with torch.no_grad():
                target = head(target_states).log_softmax(dim=-1, dtype=torch.float32)
            divergence = F.kl_div(
                logits.log_softmax(dim=-1, dtype=torch.float32), target, log_target=True, reduction="none"
            ).sum(dim=-1)
        if vocabulary is None:
            return -log_probs[:, 0], top, log_probs[:, 1:], divergence
        return -log_probs[:, 0], vocabulary.token_ids[top], log_probs[:, 1:] - vocabulary.log_weights[top], divergence

    given = [hidden, label_ids] if final_states is None else [hidden, label_ids, final_states]
    return SlotPredictions(*in_chunks(one_chunk, chunk_size, *given))


def training_loss(
    model: DFlashModel,
    tables: TargetTables,
    batch: TrainingBatch,
    objective: Objective,
    chunk_size: int = 1024,
    share: Share | None = None,
    forward: Callable[..., DFlashOutput] | None = None,
    vocabulary: Vocabulary | None = None,
    block_size: int | None = None,
    with_head: bool = True,
    progress: float = 0.0,
    clock: StageClock | None = None,
) -> StepLoss:
    """Loss of one step: `L_DFlash` for a plain drafter, plus the head's terms for a LiLiCorr model (section 3).

    Args:
        model ([`DFlashModel`]): drafter, or drafter with head.
        tables ([`TargetTables`]): of the frozen target.
        batch ([`TrainingBatch`]).
        objective ([`Objective`]).
        chunk_size (`int`): slots whose logits, and blocks of as many slots whose lattices, exist at a time.
        share ([`Share`]): what part of an optimizer step this is; by default all of it.
        forward (`Callable`): the model's forward pass, wrapped for distributed training; by default the model.
        vocabulary ([`Vocabulary`]): draws the tokens that compete for a slot; by default all do.
        block_size (`int`): of this step's blocks; by default, and at most, the model's.
        with_head (`bool`): `False` leaves a model's head out, where it is frozen.
        progress (`float`): share of the run that is over; Domino's loss moves from the drafter to its head with it.
        clock ([`StageClock`]): told at the end of each stage.
    """
    config, share = model.config, share or Share()
    clock = clock or StageClock(torch.device("cpu"))
    k, block_size = config.candidate_topk, block_size or config.block_size
    where = (batch.position_ids, batch.anchors, batch.keep)
    slots = len(range(block_size)[model.slot_rows])
    labels = slot_labels(batch.input_ids, batch.loss_mask, *where, slots)
    output = draft_blocks(model, tables, batch, block_size, model if forward is None else forward)
    hidden = output.last_hidden_state.unflatten(1, (-1, block_size))[:, :, model.slot_rows].contiguous()
    clock.mark("drafter")
    clock.mark_gradient(hidden, "lm_head")
    if isinstance(model, SequentialDraftModel):
        step = sequential_loss(model, tables, batch, objective, share, labels, hidden, chunk_size, progress)
        clock.mark("head")
        return step
    shape = labels.ids.shape
    predictions = predict_slots(
        hidden.flatten(0, 2),
        labels.ids.flatten(),
        tables,
        k,
        chunk_size,
        vocabulary.draw(labels.ids) if vocabulary is not None else None,
        slot_states(batch, shape[-1]).flatten(0, 2) if objective.distillation else None,
    )
    clock.mark("lm_head")

    step = drafter_step(objective, share, labels.supervised, predictions)
    candidate_ids, log_probs = predictions.candidate_ids.view(*shape, k), predictions.log_probs.view(*shape, k)
    truth_index, complete = index_of(labels.ids, candidate_ids), labels.supervised.all(dim=-1)
    hits = {"top1": truth_index == 0, "oracle": truth_index >= 0}
    if isinstance(model, LatticeDraftModel) and with_head:
        clock.mark_gradient(log_probs, "head")
        context = output.context_hidden_states
        lattices = Lattices(candidate_ids, log_probs, hidden, context, truth_index, complete)
        start, pair = score_lattices(model, tables, batch, lattices, chunk_size)
        add_head_terms(step, objective, share, tables, batch, lattices, start, pair, chunk_size)
        hits["selected"] = greedy_walk(start.detach(), pair.detach()) == truth_index
        clock.mark("head")
    note_prefixes(step, hits, complete)
    step.metrics["coverage"] = masked_mean(hits["oracle"], labels.supervised & complete.unsqueeze(-1))
    return step


def draft_blocks(
    model: DFlashModel,
    tables: TargetTables,
    batch: TrainingBatch,
    block_size: int,
    forward: Callable[..., DFlashOutput],
) -> DFlashOutput:
    """The drafter's pass over all blocks of a batch, whose states are `[b, N * B, M]`."""
    # Kernels of flex attention exist for GPUs and heads of at least 16; elsewhere the dense mask gives the same.
    tiled = batch.input_ids.is_cuda and model.config.head_dim >= 16
    where = (batch.position_ids, batch.anchors, batch.keep)
    blocks = pack_blocks(batch.input_ids, *where, block_size, model.mask_token_id, tiled)
    return forward(
        noise_embeds=tables.embed(blocks.input_ids).detach().to(model.dtype),
        context_hidden_states=batch.target_states.to(model.dtype),
        attention_mask=blocks.attention_mask,
        position_ids=blocks.position_ids,
        block_size=block_size,
    )


def drafter_step(
    objective: Objective, share: Share, supervised: torch.Tensor, predictions: SlotPredictions
) -> StepLoss:
    """`L_DFlash` of the slots `supervised [b, N, S]`, as their share of the optimizer step."""
    cross_entropy = predictions.cross_entropy.view(supervised.shape)
    divergence = predictions.divergence.view(supervised.shape)
    weights = drafter_weights(objective, supervised, cross_entropy)
    total, scale = drafter_total(share, weights)
    learned = cross_entropy.lerp(divergence, objective.distillation)
    step = StepLoss(losses.block_loss(learned, weights, total) * scale)
    step.parts["dflash"] = losses.block_loss(cross_entropy, weights).detach()
    if objective.distillation:
        step.parts["divergence"] = masked_mean(divergence.detach(), supervised)
    return step


def score_lattices(
    model: LatticeDraftModel, tables: TargetTables, batch: TrainingBatch, lattices: Lattices, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Start scores `[b, N, K]` and pair scores `[b, N, S - 1, K, K]` of all blocks, by the model's method."""
    if isinstance(model, DFlash2Model):
        # Its authors' training is not public: it learns as LiLiCorr's head does.
        anchor_ids = batch.input_ids.gather(1, batch.anchors)
        return model.pair_scores(lattices.log_probs, lattices.candidate_ids, anchor_ids, lattices.hidden)
    assert isinstance(model, LiLiCorrDraftModel)
    return score_blocks(model, tables, batch, lattices, chunk_size)


def score_blocks(
    model: LiLiCorrDraftModel, tables: TargetTables, batch: TrainingBatch, lattices: Lattices, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Start scores `[b, N, K]` and pair scores `[b, N, S - 1, K, K]` of the blocks that teach; 0 for the others, whose
    first slot misses the ground truth or whose end is not supervised: no term and no drafted token needs them.
    """
    b, n = batch.anchors.shape
    chosen = lattices.supervised[..., 0].flatten().nonzero().squeeze(-1)
    if len(chosen) == 0:
        # One block at least, so that every parameter of the head is part of the graph.
        chosen = chosen.new_zeros(1)
    # The anchor's row is the context before it.
    anchor = (chosen.div(n, rounding_mode="floor"), (batch.anchors.flatten()[chosen] - 1).clamp(min=0))
    anchor_valid = batch.position_ids.gather(1, batch.anchors).flatten()[chosen] > 0

    def one_chunk(ids, *inputs):
        return model.lilicorr(tables.embed(ids).detach().to(model.dtype), *inputs)

    of_slots = (lattices.candidate_ids, lattices.log_probs, lattices.hidden)
    inputs = (tensor.flatten(0, 1)[chosen] for tensor in of_slots)
    blocks = max(chunk_size // lattices.hidden.shape[2], 1)
    scores = in_chunks(one_chunk, blocks, *inputs, lattices.context[anchor], anchor_valid)
    start, pair = (x.new_zeros(b * n, *x.shape[1:]).index_copy(0, chosen, x).unflatten(0, (b, n)) for x in scores)
    return start, pair


def add_head_terms(
    step: StepLoss,
    objective: Objective,
    share: Share,
    tables: TargetTables,
    batch: TrainingBatch,
    lattices: Lattices,
    start: torch.Tensor,
    pair: torch.Tensor,
    chunk_size: int,
) -> None:
    """Adds the head's terms to the loss: means over the slots of the oracle prefixes of the whole batch."""
    supervised, candidate_ids, truth_index = lattices.supervised, lattices.candidate_ids, lattices.truth_index
    scores = losses.node_scores(start, pair, truth_index)
    count = share.reduce(supervised.sum()).clamp(min=1) * share.micro_batches / share.processes
    terms = {"cross_entropy": losses.slot_cross_entropy(scores, truth_index)}
    if objective.distractor:
        logits = candidate_target_logits(tables, batch, candidate_ids, supervised, chunk_size)
        terms["distractor"] = losses.distractor_penalty(scores, logits, truth_index)
    if objective.hinge and candidate_ids.shape[-1] > 1:
        terms["hinge"] = losses.margin_hinge(scores, truth_index, objective.margin)
    for name, value in terms.items():
        step.loss = step.loss + getattr(objective, name) * torch.where(supervised, value, value * 0.0).sum() / count
        step.parts[name] = masked_mean(value.detach(), supervised)
    step.metrics["supervised_slots"] = supervised.sum()
    step.metrics["slot_accuracy"] = masked_mean(scores.argmax(dim=-1) == truth_index, supervised)
    spread = (start.detach().std(dim=-1) + pair.detach().std(dim=(-2, -1)).mean(dim=-1)) / 2
    step.metrics["factor_spread"] = masked_mean(spread, supervised[..., 0])
    interaction = losses.pair_interaction(pair.detach())
    step.metrics["pair_interaction"] = masked_mean(interaction, supervised[..., 0])


@torch.no_grad()
def candidate_target_logits(
    tables: TargetTables,
    batch: TrainingBatch,
    candidate_ids: torch.Tensor,
    supervised: torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:
    """The target's logits `[b, N, S, K]` of the candidates, read where they are supervised and 0 elsewhere."""
    logits = torch.zeros(candidate_ids.shape, device=candidate_ids.device)
    found = supervised.nonzero()
    for first in range(0, len(found), chunk_size):
        rows, blocks, slots = found[first : first + chunk_size].unbind(dim=1)
        states = batch.final_states[rows, batch.anchors[rows, blocks] + slots]
        logits[rows, blocks, slots] = candidate_logits(tables, states, candidate_ids[rows, blocks, slots]).float()
    return logits


def index_of(label_ids: torch.Tensor, candidate_ids: torch.Tensor) -> torch.Tensor:
    """Candidate index of each label, -1 where it is not among the candidates; `[*, S]` from `[*, S]`, `[*, S, K]`."""
    match = candidate_ids == label_ids.unsqueeze(-1)
    return torch.where(match.any(dim=-1), match.int().argmax(dim=-1), -1)
