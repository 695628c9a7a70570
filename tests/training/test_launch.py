"""The shipped accelerate configs: real launches of two processes on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from small_run import small_settings
from tiny import tiny_target
from torch.testing import assert_close

from lilicorr_hf import LiLiCorrDraftModel
from lilicorr_hf.training import train


ACCELERATE = train.CONFIGS / "accelerate"
SUPPORT = Path(__file__).parent.parent / "support"


@pytest.fixture(scope="module")
def recipe(tokenizer, tmp_path_factory):
    """Three steps over all of eight rows of unequal length; evaluated and saved after the second."""
    folder = tmp_path_factory.mktemp("launch")
    target = tiny_target("llama", eos_token_id=2).float()
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    ids = torch.randint(6, 63, (8, 30), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"prompt_ids": row[:4], "response_ids": row[4 : 14 + 2 * i]} for i, row in enumerate(ids)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "w1 w2 w3"}) + "\n")
    settings = small_settings(
        folder / "target",
        train_files=[str(folder / "rows.jsonl")],
        eval_files=[str(folder / "prompts.jsonl")],
        target_layer_ids=[0, 2],
        max_anchors=8,
        max_steps=3,
        use_cpu=True,
        report_to="none",
    )
    # Every launch says itself how the eight rows are split.
    del settings["per_device_train_batch_size"]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def alone(recipe):
    """The same run in one process."""
    folder = recipe.parent / "alone"
    train.main(["--config", str(recipe), "--output_dir", str(folder), "--per_device_train_batch_size", "8"])
    return folder


def launch(config, output, *command):
    """Two processes with four of the eight rows each; fails unless both end well."""
    options = ["--config_file", str(ACCELERATE / config), "--num_processes", "2", "--main_process_port", "0"]
    command = [*command, "--output_dir", str(output), "--per_device_train_batch_size", "4", "--ddp_backend", "gloo"]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr


def history(folder, name):
    """`{step: value}` of what the last checkpoint of a run logged."""
    state = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
    return {row["step"]: row[name] for row in json.loads(state.read_text())["log_history"] if name in row}


def assert_same_run(ours, alone):
    """Same losses, acceptance length and weights; one set of whole tensors that loads as any checkpoint does."""
    assert history(ours, "loss") == pytest.approx(history(alone, "loss"), rel=1e-5)
    assert len(history(ours, "loss")) == 3
    assert history(ours, "eval_tau") == history(alone, "eval_tau")
    assert {path.name for path in ours.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    for folder in (".", "checkpoint-2", "checkpoint-3"):
        assert [path.name for path in (ours / folder).glob("*.safetensors")] == ["model.safetensors"]
        models = [LiLiCorrDraftModel.from_pretrained(run / folder) for run in (ours, alone)]
        for (name, weight), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert_close(weight, other, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        config = json.loads((ours / folder / "config.json").read_text())
        assert config["auto_map"]["AutoModel"] == "modeling_lilicorr.LiLiCorrDraftModel"
        files = [sorted(path.name for path in (run / folder).glob("*.py")) for run in (ours, alone)]
        assert files[0] == files[1]


def test_ddp(recipe, alone):
    ours = recipe.parent / "ddp"
    launch("ddp.yaml", ours, "-m", "lilicorr_hf.training.train", "--config", str(recipe))
    assert_same_run(ours, alone)


def test_hours_are_those_of_one_clock(recipe):
    """Otherwise processes would part: one ends while the other waits for it."""
    settings = yaml.safe_load(recipe.read_text()) | {"max_hours": 2 / 3600, "save_strategy": "no"}
    settings |= {"eval_strategy": "no", "logging_steps": 1}
    del settings["max_steps"]
    hours, ours = recipe.with_name("hours.yaml"), recipe.parent / "hours"
    hours.write_text(yaml.safe_dump(settings))
    launch("ddp.yaml", ours, str(SUPPORT / "unequal_clocks.py"), "--config", str(hours))
    assert history(ours, "loss")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="`fully_shard` would take the accelerator")
def test_fsdp2_and_resuming(recipe, alone):
    """Sharded over two processes; then its second half again, from the checkpoint."""
    ours, resumed = recipe.parent / "fsdp2", recipe.parent / "resumed"
    script = (str(SUPPORT / "fsdp_on_cpu.py"), "--config", str(recipe))
    launch("fsdp2.yaml", ours, *script)
    assert_same_run(ours, alone)
    launch("fsdp2.yaml", resumed, *script, "--resume_from_checkpoint", str(ours / "checkpoint-2"))
    assert history(resumed, "loss") == history(ours, "loss")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="`fully_shard` would take the accelerator")
def test_fsdp2_computes_in_bf16_where_autocast_does(recipe):
    """Its own precision policy would round the inputs and the scores of the head."""
    options = ["--config", str(recipe), "--bf16", "true", "--max_steps", "1"]
    folders = [recipe.parent / f"bf16-{name}" for name in ("alone", "fsdp2")]
    train.main([*options, "--output_dir", str(folders[0]), "--per_device_train_batch_size", "8"])
    launch("fsdp2.yaml", folders[1], str(SUPPORT / "fsdp_on_cpu.py"), *options)
    losses = [history(folder, "loss")[1] for folder in folders]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_accelerate_configs_are_no_recipes():
    with pytest.raises(FileNotFoundError, match="by that name"):
        train.named_file("ddp")
