"""The trainer on a tiny target: it learns, resumes exactly, and leaves the target alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import trainer_for
from safetensors.torch import load_file
from tiny import tiny_assistant, tiny_target
from transformers import TrainerCallback

from lilicorr_hf import DFlashModel, LiLiCorrDraftModel
from lilicorr_hf.training.data import Example


def test_overfitting_eight_answers_reaches_the_block(target, examples, answered, tmp_path):
    trainer = trainer_for(target, examples, tmp_path, prompts=answered, max_steps=300, max_anchors=24)
    before = trainer.evaluate()["eval_tau"]
    trainer.train()
    after = trainer.evaluate()["eval_tau"]
    assert before < 2 and after > 0.9 * trainer.model.config.block_size


class Gradients(TrainerCallback):
    """Keeps the gradients of the last step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.of = {name: p.grad.clone() for name, p in model.named_parameters()}


def gradients(trainer):
    callback = Gradients()
    trainer.add_callback(callback)
    trainer.train()
    return callback.of


@pytest.mark.parametrize("weights", ["decay", "uniform"])
def test_gradients_do_not_depend_on_accumulation(target, examples, tmp_path, weights):
    """8 x 1, 4 x 2 and 2 x 4 rows of unequal length: the drafter's term is one mean over the slots of all of them."""
    uneven = [Example(e.input_ids[: 12 + 2 * i], e.loss_mask[: 12 + 2 * i]) for i, e in enumerate(examples)]
    found = []
    for rows, parts in ((8, 1), (4, 2), (2, 4)):
        options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": parts, "max_steps": 1}
        drafter = tiny_assistant(0, DFlashModel)
        trainer = trainer_for(target, uneven, tmp_path, drafter, max_grad_norm=0, slot_weights=weights, **options)
        found.append(gradients(trainer))
    for name, expected in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], expected, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_compiled_model_learns_all_that_it_learns_otherwise(target, examples, answered, tmp_path):
    """Its class is another one, which must not pass for a drafter without a head. The backend computes the same."""
    compiler = {"torch_compile": True, "torch_compile_backend": "eager"}
    histories = []
    for name, options in (("plain", {}), ("compiled", compiler)):
        folder = tmp_path / name
        trainer = trainer_for(target, examples, folder, tiny_assistant(), answered[:1], max_steps=3, **options)
        trainer.train()
        trainer.evaluate()
        trainer.save_model()
        histories.append(
            [{k: v for k, v in row.items() if k.startswith(("loss", "eval_tau"))} for row in trainer.state.log_history]
        )
    assert histories[0] == histories[1] and "loss_distractor" in histories[0][0]
    plain, compiled = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "compiled"))
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)


TWO_PROCESSES = """
import os
import sys
import torch
from transformers import TrainerCallback
sys.path[:0] = {path!r}
from test_trainer import gradients, trainer_for
from runs import trainer_for
from tiny import tiny_assistant, tiny_target
torch.set_num_threads(1)
examples = torch.load({examples!r}, weights_only=False)
options = {{"per_device_train_batch_size": 8 // {processes}, "max_steps": 1, "max_grad_norm": 0}}
options["ddp_backend"] = "gloo"
found = gradients(trainer_for(tiny_target("llama").float(), examples, {folder!r}, tiny_assistant(), **options))
if torch.distributed.get_rank() == 0:
    torch.save({{name.removeprefix("module."): grad for name, grad in found.items()}}, {output!r})
torch.distributed.barrier()
torch.distributed.destroy_process_group()
# Threads of gloo may abort a process that tidies up after itself (pytorch#190489).
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("empty", [False, True])
def test_two_processes_equal_one(examples, tmp_path, empty):
    """All terms, the head's too; in the second case one process teaches the head nothing."""
    uneven = [Example(e.input_ids[: 14 + 2 * i], e.loss_mask[: 14 + 2 * i]) for i, e in enumerate(examples)]
    if empty:
        # Two supervised tokens: an anchor, one slot, no complete block.
        for e in uneven[1:]:
            e.loss_mask[:-2] = [0] * (len(e.loss_mask) - 2)
    torch.save(uneven, tmp_path / "examples")
    found = []
    for processes in (1, 2):
        output, script = tmp_path / f"gradients{processes}", tmp_path / f"run{processes}.py"
        here = Path(__file__).parent
        values = {"path": [str(here), str(here.parent / "support")], "examples": str(tmp_path / "examples")}
        values |= {"folder": str(tmp_path / "run"), "output": str(output), "processes": processes}
        script.write_text(TWO_PROCESSES.format(**values))
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        found.append(torch.load(output))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_log_carries_every_part(target, examples, tmp_path):
    trainer = trainer_for(target, examples, tmp_path, max_steps=2, hinge=0.125)
    trainer.train()
    row = trainer.state.log_history[0]
    names = ["loss_dflash", "loss_cross_entropy", "loss_distractor", "loss_hinge", "coverage", "selected_prefix"]
    names += ["top1_prefix", "oracle_prefix", "factor_spread", "blocks_per_second", "supervised_slots", "grad_norm"]
    assert all(name in row for name in names), row.keys()
    weighted = row["loss_dflash"] + 0.25 * (row["loss_cross_entropy"] + row["loss_distractor"])
    assert row["loss"] == pytest.approx(weighted + 0.125 * row["loss_hinge"], rel=1e-4)
    assert row["top1_prefix"] <= row["oracle_prefix"] and row["selected_prefix"] <= row["oracle_prefix"]


def test_resuming_equals_going_on(target, examples, tmp_path):
    """20 steps, and 10 steps with 10 more from the checkpoint: same losses, weights and dtypes."""
    options = {"max_steps": 20, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 10}
    whole = trainer_for(target, examples, tmp_path / "whole", **options)
    whole.train()
    resumed = trainer_for(target, examples, tmp_path / "resumed", model=tiny_assistant(seed=5), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (whole, resumed)]
    assert losses[0][10:] == losses[1][10:]
    for (name, ours), theirs in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert ours.dtype == theirs.dtype == torch.float32 and torch.equal(ours, theirs), name


def test_target_is_in_no_optimizer_and_no_checkpoint(target, examples, tmp_path):
    trainer = trainer_for(target, examples, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    weights = {name: p.clone() for name, p in target.named_parameters()}
    trainer.train()
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in trainer.model.parameters()}
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in target.named_parameters())
    saved = tmp_path / "checkpoint-2"
    assert set(load_file(saved / "model.safetensors")) == set(trainer.model.state_dict())
    assert "modeling_lilicorr.py" in {path.name for path in saved.iterdir()}
    assert json.loads((saved / "config.json").read_text())["auto_map"]["AutoModel"].endswith("LiLiCorrDraftModel")


def test_head_and_drafter_have_their_own_rates(target, examples, tmp_path):
    trainer = trainer_for(target, examples, tmp_path, learning_rate=1e-3, head_learning_rate=2e-3, weight_decay=0.1)
    drafter, head = trainer.create_optimizer().param_groups
    assert (drafter["lr"], drafter["weight_decay"]) == (1e-3, 0.1)
    assert (head["lr"], head["weight_decay"]) == (2e-3, 0.01)
    count = sum(p.numel() for p in trainer.model.lilicorr.parameters())
    assert sum(p.numel() for p in head["params"]) == count


@pytest.mark.parametrize("half", ["head", "drafter"])
def test_training_one_half_leaves_the_other(target, examples, tmp_path, half):
    other = {"head": "drafter", "drafter": "head"}[half]
    trainer = trainer_for(target, examples, tmp_path, max_steps=3, **{f"train_{other}": False})
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) > 20 and all(name.startswith("lilicorr.") == (half == "head") for name in moved)


@pytest.mark.parametrize("what", ["weight", "gradient of"])
def test_first_tensor_that_is_not_finite_is_named(target, examples, tmp_path, what):
    trainer = trainer_for(target, examples, tmp_path, max_steps=3)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    parameter = trainer.model.lilicorr.out_head.weight
    if what == "weight":
        parameter.data[0, 0] = torch.nan
    else:
        parameter.register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(FloatingPointError, match=f"Step 1: the {what} lilicorr.out_head.weight"):
        trainer.train()
    others = [name for name, _ in trainer.model.named_parameters() if name != "lilicorr.out_head.weight"]
    assert all(torch.equal(dict(trainer.model.named_parameters())[name], before[name]) for name in others)


def test_nothing_to_train_is_an_error(target, examples, tmp_path):
    with pytest.raises(ValueError, match="train_head"):
        trainer_for(target, examples, tmp_path, model=tiny_assistant(0, DFlashModel), train_drafter=False)


def test_plain_drafter_trains_too(target, examples, tmp_path):
    trainer = trainer_for(target, examples, tmp_path, model=tiny_assistant(0, DFlashModel), max_steps=30)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]


def test_bf16_compute_keeps_fp32_weights(target, examples, tmp_path):
    trainer = trainer_for(target, examples, tmp_path, max_steps=3, bf16=True)
    trainer.train()
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in trainer.model.parameters())


def test_wrong_target_is_refused_before_training(examples, tmp_path):
    with pytest.raises(ValueError, match="num_target_layers"):
        trainer_for(tiny_target("llama", num_hidden_layers=5), examples, tmp_path)


def test_saved_checkpoint_is_an_assistant(target, examples, answered, tmp_path):
    trainer = trainer_for(target, examples, tmp_path, max_steps=20)
    trainer.train()
    trainer.save_model()
    assistant = LiLiCorrDraftModel.from_pretrained(tmp_path)
    plain = target.generate(answered[0], do_sample=False, max_new_tokens=20)
    assert target.generate(answered[0], do_sample=False, max_new_tokens=20, assistant_model=assistant).equal(plain)
