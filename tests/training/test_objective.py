"""The training loss against a full step of nvidia-modelopt (see tests/golden), and where it must be exactly zero."""

import pytest
import torch
from tiny import tiny_assistant, tiny_target
from transformers import Qwen3Config, Qwen3ForCausalLM

from lilicorr_hf import DFlashModel, LiLiCorrConfig, LiLiCorrDraftModel
from lilicorr_hf.modeling.target_lilicorr import TargetTables
from lilicorr_hf.training import losses
from lilicorr_hf.training.objective import index_of, training_loss
from lilicorr_hf.training.step import Objective, TrainingBatch, slot_labels


class Step:
    """The golden step: frozen target, model, batch."""

    def __init__(self, case):
        spec, drafter, head = (case.spec["config"] for _ in range(3))
        drafter, head = spec["drafter"], spec["head"]
        self.case = case
        target = Qwen3ForCausalLM(Qwen3Config(**spec["target"], mask_token_id=None))
        prefix = "target."
        state = {k.removeprefix(prefix): v for k, v in case.tensors.items() if k.startswith(prefix)}
        target.load_state_dict(state)
        self.target = target.eval().requires_grad_(False)
        names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        config = LiLiCorrConfig(
            **{name: drafter[name] for name in (*names, "hidden_size", "rms_norm_eps")},
            vocab_size=spec["target"]["vocab_size"],
            rope_parameters={"rope_type": "default", "rope_theta": drafter["rope_theta"]},
            block_size=spec["block_size"],
            mask_token_id=spec["mask_token_id"],
            target_layer_ids=spec["target_layer_ids"],
            num_target_layers=spec["target"]["num_hidden_layers"],
            candidate_topk=head["lilicorr_candidate_topk"],
            head_hidden_size=head["lilicorr_hidden_size"],
            head_num_layers=head["lilicorr_num_layers"],
            head_num_heads=head["lilicorr_num_heads"],
            head_mlp_ratio=head["lilicorr_mlp_ratio"],
            factor_dim=head["lilicorr_factor_dim"],
            vector_eps=head["lilicorr_vector_eps"],
            logit_scale=head["lilicorr_logit_scale"],
        )
        self.model = LiLiCorrDraftModel(config)
        self.model.load_state_dict({k: v for k, v in case.parameters().items() if not k.startswith(prefix)})
        final = self.target.model(case.inputs("input_ids")).last_hidden_state
        # The recorded logits are those of the recorded target, so that reading them from its states is the same.
        torch.testing.assert_close(self.target.lm_head(final), case.inputs("target_logits"), atol=1e-5, rtol=0)
        self.batch = TrainingBatch(
            input_ids=case.inputs("input_ids"),
            loss_mask=case.inputs("loss_mask"),
            position_ids=torch.arange(final.shape[1]).expand(len(final), -1),
            anchors=case.inputs("anchor_positions"),
            keep=case.inputs("block_keep_mask"),
            target_states=case.inputs("target_hidden"),
            final_states=final,
        )

    def loss(self, objective, chunk_size=1024):
        return training_loss(self.model, TargetTables(self.target), self.batch, objective, chunk_size)


@pytest.fixture
def step(golden):
    return Step(golden("lilicorr_objective"))


OBJECTIVES = {"base": Objective(), "margin": Objective.with_margin()}


@pytest.mark.parametrize("variant", OBJECTIVES)
@pytest.mark.parametrize("chunk_size", [1024, 11])
def test_loss_parts_metrics_and_gradients(step, variant, chunk_size):
    expected = step.case.spec["variants"][variant]
    result = step.loss(OBJECTIVES[variant], chunk_size)
    assert result.loss.item() == pytest.approx(expected["total_loss"], abs=2e-5)
    assert result.parts["dflash"].item() == pytest.approx(expected["dflash_loss"], abs=2e-5)
    metrics = expected["metrics"]
    for ours, theirs in {"cross_entropy": "ce", "distractor": "penalty", "hinge": "margin"}.items():
        assert result.parts.get(ours, torch.zeros(())).item() == pytest.approx(metrics[f"lilicorr_{theirs}"], abs=2e-5)
    for ours, theirs in {
        "selected_prefix": "selected_prefix",
        "top1_prefix": "top1_prefix",
        "oracle_prefix": "oracle_prefix",
        "coverage": "slot_gt_in_lattice",
    }.items():
        assert result.metrics[ours].item() == pytest.approx(metrics[f"lilicorr_{theirs}"], abs=1e-5), ours
    assert 0 < result.metrics["pair_interaction"] < 2 * result.metrics["factor_spread"]
    assert result.metrics["supervised_slots"] == step.case.spec["supervised_slot_count"]
    assert result.metrics["complete_blocks"] == sum(map(sum, step.case.spec["valid_blocks"]))

    result.loss.backward()
    for name, parameter in step.model.named_parameters():
        assert parameter.grad.norm().item() == pytest.approx(expected["grad_l2"][name], rel=2e-4, abs=1e-7), name
        full = step.case.tensors.get(f"expected.{variant}.grad.{name}")
        assert full is not None, name
        assert (parameter.grad - full).abs().max() <= 5e-4 * full.abs().max() + 1e-9, name
    assert all(parameter.grad is None for parameter in step.target.parameters())


@pytest.mark.parametrize(
    "name, objective",
    [
        ("no_decay", Objective(slot_weights="uniform")),
        ("dpace_alpha0.5", Objective(slot_weights="dpace")),
        ("decay_gamma7", Objective()),
    ],
)
def test_other_weights_of_the_drafter_term(step, name, objective):
    expected = step.case.spec["alternative_dflash_losses"][name]
    result = step.loss(objective)
    assert result.parts["dflash"].item() == pytest.approx(expected["dflash_loss"], abs=2e-5)
    assert result.loss.item() == pytest.approx(expected["total_loss"], abs=2e-5)
    result.loss.backward()
    assert step.model.fc.weight.grad.norm().item() == pytest.approx(expected["grad_l2_fc"], rel=2e-4)


def test_labels_and_candidates_of_every_slot(step):
    batch = step.batch
    where = (batch.position_ids, batch.anchors, batch.keep)
    labels = slot_labels(batch.input_ids, batch.loss_mask, *where, step.model.config.num_slots)
    assert torch.equal(labels.supervised, step.case.expected("slot_mask").bool())
    inside = labels.supervised
    assert torch.equal(labels.ids[inside], step.case.expected("target_ids")[..., 1:][inside])
    truth = index_of(labels.ids, step.case.expected("candidate_token_ids"))
    keep = step.batch.keep
    assert torch.equal(truth[keep][inside[keep]], step.case.expected("gt_index")[keep][inside[keep]])


def test_slot_terms(step):
    case = step.case
    truth, supervised = case.expected("gt_index"), case.expected("supervised").bool()
    scores = 8 * losses.node_scores(case.expected("start_scores"), case.expected("pair_scores"), truth)
    for name, value in (
        ("slot_ce", losses.slot_cross_entropy(scores, truth)),
        ("slot_gap", losses.decision_gap(scores, truth)),
    ):
        torch.testing.assert_close(value[supervised], case.expected(name)[supervised], atol=5e-5, rtol=0)
    complete = torch.tensor(case.spec["valid_blocks"])
    assert torch.equal(losses.oracle_prefix(truth, complete), supervised)


@pytest.mark.parametrize("alpha", [0.5, 0.3, 1.0])
def test_dpace_weights(golden, alpha):
    case = golden("dpace_weights")
    entropy, mask = case.inputs("ce"), case.inputs("valid_mask")
    weights = losses.dpace_weights(entropy, mask, alpha) * mask
    torch.testing.assert_close(weights, case.expected(f"alpha{alpha}.weights_masked"), atol=1e-5, rtol=0)
    weights = losses.dpace_weights(entropy, torch.ones_like(mask), alpha)
    torch.testing.assert_close(weights, case.expected(f"alpha{alpha}.weights_nomask"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_class", [LiLiCorrDraftModel, DFlashModel])
def test_nothing_supervised_is_zero_loss_with_a_graph_to_every_parameter(model_class):
    target, model = tiny_target("llama").float(), tiny_assistant(0, model_class).train()
    batch = TrainingBatch(
        input_ids=torch.randint(0, 64, (1, 20)),
        loss_mask=torch.zeros(1, 20),
        position_ids=torch.arange(20).unsqueeze(0),
        anchors=torch.tensor([[4, 0]]),
        keep=torch.tensor([[True, False]]),
        target_states=torch.randn(1, 20, 64),
        final_states=torch.randn(1, 20, 32),
    )
    result = training_loss(model, TargetTables(target), batch, Objective.with_margin())
    assert result.loss.item() == 0.0
    result.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() == 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_log_probs_are_log_softmax_gathered(dtype):
    torch.manual_seed(0)
    logits = (3 * torch.randn(6, 50)).to(dtype)
    # A token that is both label and candidate gets both gradients.
    ids = torch.tensor([[4, 4, 9]]).repeat(6, 1)
    weights = torch.randn(6, 3)
    gradients = []
    for function in (losses.token_log_probs, lambda x, ids: x.float().log_softmax(dim=-1).gather(-1, ids)):
        leaf = logits.clone().requires_grad_()
        values = function(leaf, ids)
        (weights * values).sum().backward()
        gradients.append((values.detach(), leaf.grad))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_weights_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"no `slot_weights` 'unifrom'; take one of \('decay', 'dpace', 'uniform'\)"):
        Objective(slot_weights="unifrom")
