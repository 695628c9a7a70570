"""Training the other heads: their losses against their authors' numbers, and the trainer's steps."""

import pytest
import torch
from goldens import Golden
from runs import trainer_for
from tiny import tiny_config

from lilicorr_hf import DFlash2Model, DominoModel, DSparkModel, LiLiCorrDraftModel
from lilicorr_hf.training.losses import decay_weights
from lilicorr_hf.training.sequential import SequentialPredictions, domino_loss, dspark_terms


RIVALS = {
    "domino": (DominoModel, {"gru_hidden_dim": 8, "emb_dim": 6}),
    "dspark": (DSparkModel, {"markov_rank": 6, "markov_head_type": "rnn"}),
    "dflash2": (DFlash2Model, {"selector_rank": 6, "conv_kernel_size": 2, "conv_group_size": 8}),
    "lilicorr with convolutions": (LiLiCorrDraftModel, {"conv_kernel_size": 2, "conv_group_size": 8}),
}


def labels_of(case, rows):
    """Labels of positions `anchor + 1 + p`, and whether they count, `[4, rows]`."""
    positions = case.inputs("anchor_positions").unsqueeze(-1) + 1 + torch.arange(rows)
    ids, mask = case.inputs("input_ids"), case.inputs("loss_mask")
    inside = positions < ids.shape[1]
    flat = positions.clamp(max=ids.shape[1] - 1).flatten(1)
    labels, counts = (x.gather(1, flat).view_as(positions) for x in (ids, mask))
    return labels.flatten(0, 1), (inside & (counts > 0)).flatten(0, 1)


def cross_entropy(logits, labels):
    return -logits.log_softmax(dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def test_domino_loss():
    case = Golden.load("domino_head_small")
    expected, tolerance = case.spec["loss_example"], case.spec["tolerances"]["loss_abs"]
    labels, counts = labels_of(case, 6)
    final = cross_entropy(case.expected("shift_prefix1.logits").flatten(0, 1), labels)
    base = cross_entropy(case.inputs("base_logits").flatten(0, 1), labels)
    predictions = SequentialPredictions(final, base, *[torch.zeros_like(final)] * 4)
    weights = decay_weights(6, 7.0) * counts
    for share, name in ((0.3, "total"), (0.0, "final_loss"), (1.0, "base_loss")):
        loss = domino_loss(predictions, weights, share).item()
        assert loss == pytest.approx(expected[name], abs=tolerance)


@pytest.mark.parametrize("variant", ["vanilla", "gated", "rnn"])
def test_dspark_loss(variant):
    case = Golden.load("dspark_head_small")
    expected = case.spec["per_variant"][variant]["loss_example"]
    labels, counts = labels_of(case, 6)
    logits = case.expected(f"{variant}.logits").flatten(0, 1)
    positions = case.inputs("anchor_positions").unsqueeze(-1) + torch.arange(6)
    rows = torch.arange(2)[:, None, None].expand_as(positions)
    wanted = case.inputs("target_logits")[rows, positions.clamp(max=19)].flatten(0, 1)
    distance = (logits.softmax(dim=-1) - wanted.softmax(dim=-1)).abs().sum(dim=-1)
    confidence = case.expected(f"{variant}.confidence_logits").flatten(0, 1)
    entropy = cross_entropy(logits, labels)
    predictions = SequentialPredictions(entropy, entropy, distance, confidence, labels == 0, labels == 0)
    weights = decay_weights(6, 7.0) * (counts.long().cumprod(dim=-1) > 0)
    terms = dspark_terms(predictions, weights)
    tolerance = case.spec["tolerances"]["loss_abs"]
    for name, key in (("cross_entropy", "ce_loss"), ("distance", "l1_loss"), ("confidence", "confidence_loss")):
        assert terms[name].item() == pytest.approx(expected[key], abs=tolerance)
    total = 0.1 * terms["cross_entropy"] + 0.9 * terms["distance"] + 0.5 * terms["confidence"]
    assert total.item() == pytest.approx(expected["total"], abs=tolerance)


@pytest.mark.parametrize("name", RIVALS)
def test_the_trainer_trains_them(name, target, examples, answered, tmp_path):
    """Every parameter learns, and evaluation drafts with the head."""
    model_class, fields = RIVALS[name]
    model = model_class(tiny_config(**fields))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    trainer = trainer_for(
        target, examples, tmp_path, prompts=answered[:1], model=model, max_steps=4, slot_weights="decay",
        short_blocks=0.5, learning_rate=1e-2, head_learning_rate=1e-2,
    )  # fmt: skip
    trainer.train()
    # In one block of few steps not every token of a table is met.
    still = [key for key, tensor in model.state_dict().items() if tensor.equal(before[key])]
    assert not still, still
    assert trainer.evaluate()["eval_tau"] >= 1
    assert all(torch.tensor(row["loss"]).isfinite() for row in trainer.state.log_history if "loss" in row)


def test_options_that_would_not_be_heard_are_refused(target, examples, tmp_path):
    model = DominoModel(tiny_config(gru_hidden_dim=8, emb_dim=6))
    with pytest.raises(ValueError, match="DominoModel.*slot_vocabulary"):
        trainer_for(target, examples, tmp_path, model=model, slot_vocabulary=32)
