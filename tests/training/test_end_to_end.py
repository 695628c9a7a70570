"""From prompts to an assistant, through the commands a user runs."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from small_run import small_settings
from typer.testing import CliRunner

from lilicorr_hf import LiLiCorrDraftModel
from lilicorr_hf.cli import app
from lilicorr_hf.training import train


def lilicorr(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def target_folder(model, tokenizer, tmp_path):
    folder = tmp_path / "target"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config_file(target_folder, prompts, tmp_path):
    settings = small_settings(
        target_folder,
        output_dir=str(tmp_path / "run"),
        train_files=[str(tmp_path / "answers.jsonl.gz")],
        eval_files=[str(prompts)],
        eval_prompts=4,
        eval_max_new_tokens=64,
        max_anchors=8,
        packing=True,
        max_length=100,
        max_steps=10,
        logging_steps=10,
        eval_steps=30,
        save_steps=30,
        metric_for_best_model="tau",
        greater_is_better=True,
        bf16=True,
        use_cpu=True,
        report_to="none",
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_regenerate_train_evaluate_save_load_generate(model, target_folder, prompts, config_file, tmp_path):
    options = ("--max_new_tokens", 30, "--max_prompt_tokens", 60, "--dtype", "float32", "--limit", 16)
    answers = tmp_path / "answers.jsonl.gz"
    report = lilicorr("regenerate", "--target", target_folder, "--dataset", prompts, "--output", answers, *options)
    assert json.loads(report[report.index("{") :])["answers"] == 16

    lilicorr("train", "--config", config_file, "--max_steps", 60)
    state = json.loads((tmp_path / "run" / "checkpoint-60" / "trainer_state.json").read_text())
    assert state["global_step"] == 60, "the command line overrides the file"
    assert state["best_metric"] >= 1.0
    assert [row["step"] for row in state["log_history"] if "eval_tau" in row] == [30, 60]

    picture = Path(lilicorr("plot", tmp_path / "run").strip().splitlines()[-1])
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000

    report = lilicorr("doctor", target_folder, tmp_path / "run", "--max-new-tokens", 30)
    assert "probe: layers and rotations repeat it" in report

    assistant = LiLiCorrDraftModel.from_pretrained(tmp_path / "run")
    prompt = torch.tensor([[1, 4, 9, 2, 5]])
    plain = model.generate(prompt, do_sample=False, max_new_tokens=20)
    assert model.generate(prompt, do_sample=False, max_new_tokens=20, assistant_model=assistant).equal(plain)


def test_unknown_option_in_the_file_is_named(config_file):
    config_file.write_text(config_file.read_text() + "learning_rat: 1\n")
    with pytest.raises(ValueError, match="learning_rat"):
        train.parse_arguments(["--config", str(config_file)])


def test_command_line_wins_over_the_file(config_file):
    model_args, _, args = train.parse_arguments(["--config", str(config_file), "--block_size", "7", "--beta", "3"])
    assert (model_args.block_size, args.beta, args.max_steps) == (7, 3.0, 10)


def test_recipes_go_by_name_and_unknown_ones_are_named():
    model_args, _, args = train.parse_arguments(["--config", "smollm2-135m-cpu", "--output_dir", "x"])
    assert (model_args.target, model_args.mask_token_id, args.output_dir) == ("smollm2-135m", 16, "x")
    with pytest.raises(FileNotFoundError, match="smollm2-135m-cpu"):
        train.parse_arguments(["--config", "llama"])


def test_plot_of_a_folder_without_a_run_is_an_error(tmp_path):
    result = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert result.exit_code == 2 and "trainer_state.json" in result.output


@pytest.mark.parametrize("given, words", [(None, "`mask_token_id` is required"), (2, "2 is the target's end or")])
def test_new_drafter_needs_a_mask_token_of_its_own(config_file, prompts, given, words):
    settings = yaml.safe_load(config_file.read_text())
    settings["train_files"] = [str(prompts.with_name("rows.jsonl"))]
    prompts.with_name("rows.jsonl").write_text(json.dumps({"prompt_ids": [1, 4], "response_ids": [7, 8, 9, 2]}))
    del settings["mask_token_id"]
    settings |= {} if given is None else {"mask_token_id": given}
    config_file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match=words):
        train.main(["--config", str(config_file)])
