"""What a run leaves behind: weights, config, code, and papers that say where they came from."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from small_run import supervised_blocks, write_small_run
from tiny import tiny_assistant
from typer.testing import CliRunner

from lilicorr_hf.cli import app
from lilicorr_hf.training import provenance, train
from lilicorr_hf.training.arguments import LiLiCorrTrainingArguments
from lilicorr_hf.training.card import main as card_main
from lilicorr_hf.training.data import BlockDataset, Example
from lilicorr_hf.training.trainer import LiLiCorrTrainer


CODE = {
    f"{name}.py" for name in ("configuration_lilicorr", "generation_lilicorr", "hook_lilicorr", "lattice_lilicorr")
}
CODE |= {"modeling_dflash.py", "modeling_lilicorr.py", "target_lilicorr.py"}
PAPERS = {"README.md", "recipe.yaml", "training.json"}


@pytest.fixture(scope="module")
def finished(model, tokenizer, tmp_path_factory):
    """The folder around a run of four steps."""
    folder = tmp_path_factory.mktemp("around")
    train.main(["--config", str(write_small_run(folder, model, tokenizer)), "--beta", "3", "--hub_token", "hf_secret"])
    return folder


def record(folder):
    return json.loads((folder / "training.json").read_text())


def table(card_text):
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card_text, re.MULTILINE))


def test_two_processes_count_together(finished, tmp_path):
    options = ["--config", str(finished / "config.yaml"), "--output_dir", str(tmp_path / "run"), "--beta", "3"]
    options += ["--per_device_train_batch_size", "2", "--ddp_backend", "gloo", "--eval_strategy", "no"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += ["-m", "lilicorr_hf.training.train", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    whole, split = record(finished / "run"), record(tmp_path / "run")
    assert (split["progress"]["blocks"], split["progress"]["steps"]) == (whole["progress"]["blocks"], 4)
    assert split["blocks_per_step"] == whole["blocks_per_step"]
    assert split["command"].startswith("accelerate launch --num_processes 2 -m lilicorr_hf.training.train")


@pytest.mark.parametrize("name", ["checkpoint-2", "checkpoint-4", "."])
def test_every_saved_folder_is_complete(finished, name):
    folder = finished / "run" / name
    names = {path.name for path in folder.iterdir()}
    assert names >= CODE | PAPERS | {"config.json", "model.safetensors"}
    for paper in PAPERS:
        assert str(finished) not in (folder / paper).read_text()
    for path in folder.iterdir():
        assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path.name


def test_metadata(finished):
    data = ModelCard.load(finished / "run" / "README.md").data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", "apache-2.0")
    assert data.datasets == ["somebody/prompts"]
    assert {"speculative-decoding", "dflash", "draft-model", "lilicorr"} <= set(data.tags)
    assert data.base_model is None, "the target is a folder"


def test_hub_ids_of_targets(finished):
    assert provenance.hub_id("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert provenance.hub_id("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    assert provenance.hub_id(str(finished / "target")) is None


def test_training_table(finished):
    rows = table((finished / "run" / "README.md").read_text())
    # Two steps of four rows are an epoch.
    assert rows["blocks seen"] == str(2 * supervised_blocks(finished / "answers.jsonl"))
    assert rows["steps"].startswith("4 of ")
    assert float(rows["hours, evaluation included"]) >= 0 and record(finished / "run")["progress"]["hours"] > 0
    assert rows["data"] == "answers.jsonl (8 rows); examples trained on: 8"
    assert (rows["block size (B)"], rows["candidates per slot (K)"], rows["tapped target layers"]) == ("5", "3", "0")
    assert (rows["learning rate, drafter"], rows["learning rate, head"]) == ("0.0006", "0.00015")
    assert "base objective" in rows["loss"] and "beta 3" in rows["loss"]
    weights = load_file(finished / "run" / "model.safetensors")
    counts = {part: sum(w.numel() for name, w in weights.items() if name.startswith("lilicorr.") == (part == "head"))
              for part in ("drafter", "head")}  # fmt: skip
    for part, count in counts.items():
        assert rows[part].endswith(f" {count:,} parameters")


def test_tau_of_the_run(finished):
    state = json.loads((finished / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    taus = [row["eval_tau"] for row in state["log_history"] if "eval_tau" in row]
    assert len(taus) == 2
    text = (finished / "run" / "README.md").read_text()
    assert f"| evaluation of the run (3 prompts) | last | {taus[1]:.3f} |" in text
    assert f"| evaluation of the run (3 prompts) | best | {max(taus):.3f} |" in text
    assert "| by domain | not measured |" in text
    early = (finished / "run" / "checkpoint-2" / "README.md").read_text()
    assert f"| last | {taus[0]:.3f} |" in early and "| steps | 2 of" in early


def test_hardware_names_no_host(finished):
    assert platform.node() not in (finished / "run" / "training.json").read_text()
    [hardware] = record(finished / "run")["hardware"]
    assert re.search(r", threads: \d+$", hardware)
    assert f"| hardware | {hardware} |" in (finished / "run/README.md").read_text()


def test_versions_and_commit(finished):
    made = record(finished / "run")
    assert made["versions"].keys() == {"python", "torch", "transformers", "lilicorr_hf"}
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert (made["commit"] or "").removesuffix("-dirty") == git.stdout.strip()


def test_command_has_neither_folders_nor_tokens(finished):
    expected = "lilicorr train --config config.yaml --beta 3 --hub_token HUB_TOKEN"
    assert record(finished / "run")["command"] == expected
    assert f"$ {expected}\n" in (finished / "run" / "README.md").read_text()
    line = provenance.command_line(["--train_files=/a/b c.jsonl", "d/e.jsonl"], processes=2)
    assert line == (
        "accelerate launch --num_processes 2 -m lilicorr_hf.training.train '--train_files=b c.jsonl' d/e.jsonl"
    )


def test_recipe_makes_the_run_again(finished, tmp_path, monkeypatch):
    for name in ("target", "answers.jsonl", "held_out.jsonl"):
        (tmp_path / name).symlink_to(finished / name)
    monkeypatch.chdir(tmp_path)
    train.main(["--config", str(finished / "run" / "recipe.yaml")])
    again, first = (load_file(folder / "run" / "model.safetensors") for folder in (tmp_path, finished))
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert (tmp_path / "run" / "recipe.yaml").read_text() == (finished / "run" / "recipe.yaml").read_text()


def test_recipe_leaves_out_where_things_go(finished, tmp_path):
    made = record(finished / "run")
    made["arguments"] |= {"push_to_hub": True, "hub_model_id": "me/x", "resume_from_checkpoint": "checkpoint-2"}
    provenance.write_record(tmp_path, made)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text()) == record(finished / "run")["arguments"]


def test_resuming_goes_on_counting(finished, tmp_path):
    """Also where the first half ran elsewhere."""
    checkpoint = shutil.copytree(finished / "run" / "checkpoint-2", tmp_path / "checkpoint-2")
    provenance.write_record(checkpoint, record(checkpoint) | {"hardware": ["NVIDIA H200"]})
    options = ["--config", str(finished / "config.yaml"), "--beta", "3", "--resume_from_checkpoint", str(checkpoint)]
    train.main([*options, "--output_dir", str(tmp_path / "resumed")])
    whole, resumed, half = (record(f)["progress"] for f in (finished / "run", tmp_path / "resumed", checkpoint))
    assert (resumed["blocks"], resumed["steps"]) == (whole["blocks"], whole["steps"])
    assert resumed["hours"] > half["hours"]
    assert "| hardware | NVIDIA H200, then " in (tmp_path / "resumed" / "README.md").read_text()


def test_counts_are_not_guessed_after_a_checkpoint_without_record(finished, tmp_path):
    checkpoint = shutil.copytree(finished / "run" / "checkpoint-2", tmp_path / "checkpoint-2")
    (checkpoint / "training.json").unlink()
    options = ["--config", str(finished / "config.yaml"), "--resume_from_checkpoint", str(checkpoint)]
    train.main([*options, "--output_dir", str(tmp_path / "resumed")])
    rows = table((tmp_path / "resumed" / "README.md").read_text())
    assert (rows["blocks seen"], rows["hours, evaluation included"]) == ("not measured", "not measured")


def test_first_code_block_runs(finished, model, monkeypatch):
    code = re.search(r"```python\n(.*?)```", (finished / "run" / "README.md").read_text(), re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line]) == 3
    monkeypatch.chdir(finished)
    names = {"model": model, "inputs": {"input_ids": torch.tensor([[1, 4, 9]])}}
    exec(code.replace("max_new_tokens=128", "max_new_tokens=10"), names)
    assert names["output"].equal(model.generate(**names["inputs"], max_new_tokens=10))


def test_card_with_a_bench(finished, tmp_path):
    numbers, run = tmp_path / "numbers.json", finished / "run"
    options = ["--target", finished / "target", "--assistant", run, "--max-new-tokens", 8, "--output", numbers]
    result = CliRunner().invoke(app, ["bench", *map(str, [finished / "held_out.jsonl", *options])])
    assert numbers.is_file(), result.output
    before = (run / "README.md").read_text()
    result = CliRunner().invoke(app, ["card", str(run), "--bench", str(numbers), "--license", "mit"])
    assert result.exit_code == 0, result.output
    after = (run / "README.md").read_text()
    (run / "README.md").write_text(before)
    rows = [row for row in json.loads(numbers.read_text())["summary"] if row["system"] != "plain"]
    assert len(rows) == 5
    for row in rows:
        start = f"| held_out | {row['system']} | {row['tau']:.3f} | {row['speedup']:.2f}x ("
        assert start in after and f" | {row['identical']}/3 |" in after
    assert "| plain |" not in after
    assert "license: mit" in after and "| by domain |" not in after


def test_card_of_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"training\.json"):
        card_main([str(tmp_path)])


def test_drafter_alone_has_no_head_in_its_card(model, tokenizer, tmp_path):
    config = write_small_run(tmp_path, model, tokenizer, method="dflash", max_steps=2, slot_weights="dpace")
    train.main(["--config", str(config)])
    text = (tmp_path / "run" / "README.md").read_text()
    assert "DFlashModel.from_pretrained" in text and "head" not in table(text)
    assert table(text)["loss"] == "drafter alone: slots weighted by dpace"


@pytest.mark.parametrize(
    "method, head, loss",
    [
        ("domino", "recurrent, state 1024, correction of rank 256, ", "Domino's own: cross-entropy of the drafter's"),
        ("dspark", "vanilla Markov, rank 256, ", "DSpark's own: cross-entropy, distance"),
    ],
)
def test_other_heads_are_described_as_what_they_are(model, tokenizer, tmp_path, method, head, loss):
    config = write_small_run(tmp_path, model, tokenizer, method=method, max_steps=1)
    train.main(["--config", str(config)])
    rows = table((tmp_path / "run" / "README.md").read_text())
    assert rows["head"].startswith(head) and rows["loss"].startswith(loss)
    assert "candidates per slot (K)" not in rows
    with pytest.raises(ValueError, match=r"loss of its own: \['distractor'\] do not apply"):
        train.main(["--config", str(config), "--distractor", "0.5"])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"train_drafter": False}, ("head only", "frozen", "0.00015")),
        ({"train_head": False, "hinge": 0.125}, ("drafter only, margin", "0.0006", "frozen")),
    ],
)
def test_trainer_built_in_python(model, tmp_path, options, words):
    """No command to state; one half frozen."""
    args = LiLiCorrTrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", **options)
    examples = [Example([1, 2, 3, 4, 5, 6, 7], [0, 1, 1, 1, 1, 1, 1])]
    assistant = tiny_assistant(num_target_layers=2, target_layer_ids=[0])
    trainer = LiLiCorrTrainer(assistant, model, args, BlockDataset(examples, 4))
    trainer.save_model()
    text = (tmp_path / "run" / "README.md").read_text()
    rows = table(text)
    assert "built in Python" in text and rows["loss"].startswith(words[0])
    assert (rows["learning rate, drafter"], rows["learning rate, head"]) == words[1:]
    assert rows["blocks seen"] == "0" and rows["data"] == "examples trained on: 1"
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["output_dir"] == "run"
