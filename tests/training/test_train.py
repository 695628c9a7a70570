"""What a run starts from: nothing, a checkpoint, or the drafter of one."""

import pytest
import torch
from tiny import tiny_assistant, tiny_target

from lilicorr_hf import DFlashModel
from lilicorr_hf.training import options
from lilicorr_hf.training.train import load_model, new_trainer, parse_arguments


def load(*argv):
    return load_model(parse_arguments(["--output_dir", "unused", *map(str, argv)])[0], tiny_target("llama"))


@pytest.fixture
def checkpoint(tmp_path):
    model = tiny_assistant()
    model.save_pretrained(tmp_path)
    return tmp_path, model


@pytest.mark.parametrize("method", ["lilicorr", "domino", "dspark", "dflash2", "dflash"])
def test_a_drafter_goes_on_under_a_new_head(checkpoint, method):
    folder, saved = checkpoint
    model, new = load("--drafter", folder, "--method", method, "--head_hidden_size", 24, "--candidate_topk", 3)
    drafter = DFlashModel.from_pretrained(folder).state_dict()
    state = model.state_dict()
    assert all(state[name].equal(tensor) for name, tensor in drafter.items())
    assert new == state.keys() - drafter.keys() and bool(new) == model.has_head
    assert model.config.block_size == saved.config.block_size and model.config.candidate_topk == 3
    if method == "lilicorr":
        assert model.lilicorr.out_head.in_features == 24


def test_its_rows_go_on_to_predict_their_own_slots(checkpoint):
    model, _ = load("--drafter", checkpoint[0], "--method", "domino")
    assert model.slot_rows == slice(1, None)


def test_convolutions_join_a_drafter_and_change_nothing_at_first(checkpoint):
    model, new = load("--drafter", checkpoint[0], "--conv_kernel_size", 3, "--conv_group_size", 8)
    assert any("conv" in name for name in new)
    plain = DFlashModel.from_pretrained(checkpoint[0])
    block, context = torch.randn(1, plain.config.block_size, 32), torch.randn(1, 5, 64)
    torch.testing.assert_close(model.eval()(block, context)[0], plain(block, context)[0])


def test_a_drafter_with_convolutions_keeps_them(tmp_path):
    tiny_assistant(conv_kernel_size=3, conv_group_size=8).save_pretrained(tmp_path)
    model, new = load("--drafter", tmp_path)
    assert model.config.conv_kernel_size == 3 and not any("conv" in name for name in new)


def test_what_contradicts_itself_is_refused(checkpoint, tmp_path):
    folder, _ = checkpoint
    with pytest.raises(ValueError, match="assistant.*or `drafter`"):
        load("--drafter", folder, "--assistant", folder)
    tiny_assistant(0, DFlashModel).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"missing tensors.*lilicorr.*--drafter"):
        load("--assistant", tmp_path / "plain")


@pytest.mark.parametrize(
    "options, missing",
    [
        (["--metric_for_best_model", "tau"], "--eval_files"),
        (["--metric_for_best_model", "tau", "--eval_files", "some.jsonl", "--eval_prompts", "0"], "--eval_files"),
        (["--metric_for_best_model", "selected_prefix", "--eval_files", "some.jsonl"], "--held_out"),
    ],
)
def test_a_best_checkpoint_needs_something_to_be_best_at(options, missing):
    arguments = parse_arguments(["--output_dir", "unused", "--eval_strategy", "steps", *options])
    with pytest.raises(ValueError, match=missing):
        new_trainer(*arguments)


@pytest.mark.parametrize("instructions", [False, True])
def test_bf16_is_the_default_only_where_it_is_fast(monkeypatch, instructions):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(options, "cpu_has_bf16", lambda: instructions)
    assert options.fast_dtype() == ("bfloat16" if instructions else "float32")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert options.fast_dtype() == "bfloat16"


@pytest.mark.parametrize("either_form", [["--config", "smollm2-135m-cpu"], ["--config=smollm2-135m-cpu"]])
@pytest.mark.parametrize(
    ("options", "hours"),
    [([], 8.0), (["--max_steps", "3"], None), (["--max_steps=3"], None), (["--max_hours", "2"], 2.0)],
)
def test_steps_of_the_command_line_win_over_hours_of_a_recipe(either_form, options, hours):
    args = parse_arguments([*either_form, *options])[2]
    assert args.max_hours == hours and (args.max_steps == 3) == (hours is None)
