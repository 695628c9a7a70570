"""What changes in the course of a run: blocks, and the time that is left."""

import sys
import time

import pytest
import torch
from runs import trainer_for
from transformers import TrainerCallback

from lilicorr_hf.training.budget import schedule_over
from lilicorr_hf.training.data import BlockDataset, split_held_out


def logged(trainer, name):
    return [row.get(name) for row in trainer.state.log_history if "loss" in row]


def test_blocks_grow(target, examples, tmp_path):
    trainer = trainer_for(target, examples, tmp_path, max_steps=8, short_blocks=0.25, slot_vocabulary=32)
    sizes = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            sizes.append(trainer.block_size)

    trainer.add_callback(Watch())
    trainer.train()
    assert sizes == [2] * 2 + [5] * 6
    # Blocks of 2 have one slot, blocks of 5 have four.
    assert max(logged(trainer, "oracle_prefix")[:2]) <= 1


def test_stages_add_up(target, examples, tmp_path):
    trainer = trainer_for(target, examples, tmp_path, max_steps=2)
    trainer.train()
    shares = {name: value for name, value in trainer.state.log_history[0].items() if name.startswith("share_")}
    assert set(shares) == {f"share_{stage}" for stage in ("target", "drafter", "lm_head", "head", "optimizer")}
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0


def test_a_budget_of_time_ends_the_run_at_rate_zero(target, examples, tmp_path, capsys):
    options = {"max_hours": 3 / 3600, "lr_scheduler_type": "linear", "disable_tqdm": False}
    trainer = trainer_for(target, examples, tmp_path, **options)
    trainer.train()
    # The bar counts steps of this run, and only at its very first look all that a machine can count.
    steps, bar = trainer.state.global_step, capsys.readouterr().err
    assert f"{steps}/{steps} " in bar and bar.count(str(sys.maxsize)) == 1
    rates = logged(trainer, "learning_rate")
    assert trainer.elapsed == 1.0
    assert len(rates) == trainer.state.global_step > 3
    # The last step began before the time was over; the rate then is that of the step before.
    assert rates[-1] < 0.35 * max(rates)


def test_a_budget_of_processor_time_leaves_waiting_out(target, examples, tmp_path):
    """A run that sleeps through every step has its hours all the same."""
    options = {"max_hours": 0.5 / 3600, "lr_scheduler_type": "linear", "clock": "processor"}
    trainer = trainer_for(target, examples, tmp_path, **options)

    class Sleep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            time.sleep(0.05)

    trainer.add_callback(Sleep())
    start = time.perf_counter()
    trainer.train()
    assert trainer.elapsed == 1.0 and time.perf_counter() - start > 0.5 + 0.05 * (trainer.state.global_step - 1)


def test_a_share_and_a_schedule_of_hours(target, examples, tmp_path):
    with pytest.raises(ValueError, match="`warmup_steps` is 100 steps.*the share of the run"):
        trainer_for(target, examples, tmp_path, max_hours=1.0, warmup_steps=100)
    options = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}}
    trainer = trainer_for(target, examples, tmp_path, max_hours=1 / 3600, learning_rate=1.0, **options)
    trainer.train()
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.5)


def test_the_last_part_of_hours_is_evaluated_by_whoever_watches_the_share(target, examples, answered, tmp_path):
    """Resuming puts the budget behind other callbacks: the end is seen in its step all the same."""
    options = {"max_hours": 1 / 3600, "save_strategy": "steps", "save_steps": 2}
    first = trainer_for(target, examples, tmp_path, **options)
    first.args.max_steps = 2
    first.train()
    trainer, seen = trainer_for(target, examples, tmp_path, prompts=answered[:1], **options), []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(trainer.elapsed)
            control.should_evaluate = trainer.elapsed == 1.0

        def on_evaluate(self, args, state, control, **kwargs):
            seen.append("evaluated")

    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen[-2:] == [1.0, "evaluated"]


def test_resuming_counts_the_hours_on(target, examples, tmp_path):
    options = {"max_hours": 1.0, "save_strategy": "steps", "save_steps": 3}
    first = trainer_for(target, examples, tmp_path, **options)
    first.args.max_steps = 3
    first.train()
    second = trainer_for(target, examples, tmp_path, **options | {"max_hours": 0.5})
    second.args.max_steps = 4
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert second.elapsed > 2 * first.elapsed > 0


def test_schedule_follows_the_progress():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    progress = iter((0.0, 0.05, 0.1, 0.55, 1.0))
    schedule = schedule_over(lambda: next(progress), "linear", optimizer, 0.1)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(4):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0], abs=1e-3)


def test_held_out_rows_are_the_same_in_every_run_and_evaluated(target, examples, answered, tmp_path):
    kept, held_out = split_held_out(examples, 0.4)
    assert kept and held_out and split_held_out(reversed(examples), 0.4)[1] == held_out[::-1]
    trainer = trainer_for(target, kept, tmp_path, prompts=answered[:1], max_steps=1)
    trainer.held_out = BlockDataset(held_out, 16)
    found = trainer.evaluate()
    assert 0 <= found["eval_top1_prefix"] <= found["eval_oracle_prefix"] <= trainer.model.config.num_slots
    assert 0 <= found["eval_selected_prefix"] <= found["eval_oracle_prefix"] and "eval_coverage" in found
