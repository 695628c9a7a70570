"""The prepared GPU run, small and on a CPU: the same script, every step of it."""

import json
import subprocess
import sys
from pathlib import Path

from regeneration import read_rows, write_rows
from tiny import tiny_target

from lilicorr_hf import LiLiCorrDraftModel


SCRIPT = Path(__file__).parent.parent / "gpu" / "train_smollm2.py"


def test_smoke(tokenizer, tmp_path):
    shapes = {"num_hidden_layers": 8, "hidden_size": 64, "head_dim": 16, "intermediate_size": 8192}
    target = tiny_target("llama", eos_token_id=2, max_position_embeddings=1024, **shapes)
    target.float().save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"id": f"p{i}", "prompt": f"w{i} w{i + 1} w{2 * i % 58}"} for i in range(40)]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows[:36])
    held_out = write_rows(tmp_path / "held_out.jsonl", rows[36:])
    out = tmp_path / "out"

    options = {"target": tmp_path / "target", "prompts": prompts, "held_out": held_out, "output": out, "minutes": 0.6}
    command = [sys.executable, str(SCRIPT), "--smoke", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr

    report = json.loads((out / "report.json").read_text())
    assert report["prompts"] == 36 and report["hardware"] and report["provenance"]["torch"]
    assert report["regenerate"]["answers"] == len(read_rows(out / "answers.jsonl.gz")) >= 8
    assert report["train"]["blocks_per_second"] > 0
    assert 3 <= report["train"]["steps"] <= report["train"]["planned_steps"]
    assert [row["system"] for row in report["bench"]] == ["plain", "lilicorr", "argmax"]
    assert all(row["count"] == 2 and row["tau"] >= 1 for row in report["bench"])

    shards = list((out / "drafter").glob("*.safetensors"))
    assert len(shards) > 1 and all(shard.stat().st_size <= 15_100_000 for shard in shards)
    drafter = LiLiCorrDraftModel.from_pretrained(out / "drafter")
    assert (drafter.config.block_size, drafter.config.candidate_topk) == (16, 8)
    assert drafter.num_parameters() == report["train"]["parameters"]


def test_without_a_gpu_it_says_so(tmp_path):
    options = ["--prompts", "x", "--held_out", "x", "--output", str(tmp_path / "out")]
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=900)
    assert done.returncode == 2 and "there is no GPU" in done.stderr and not (tmp_path / "out").exists()
