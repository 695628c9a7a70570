"""The prepared run of a GPU's speed, small and on a CPU: the same script, every step of it."""

import json
import subprocess
import sys
from pathlib import Path

from regeneration import word_tokenizer, write_rows
from tiny import tiny_assistant, tiny_target

from lilicorr_hf.profile import PARTS


SCRIPT = Path(__file__).parent.parent / "gpu" / "speed.py"


def test_smoke(tmp_path):
    tiny_target("llama", eos_token_id=2, pad_token_id=0).float().save_pretrained(tmp_path / "target")
    tokenizer = word_tokenizer()
    tokenizer.pad_token = "<unk>"
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_assistant().save_pretrained(tmp_path / "assistant")
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"id": i, "prompt": f"w{i} w{3 * i} w7"} for i in range(3)])
    output = tmp_path / "speed.json"

    options = {"target": tmp_path / "target", "assistant": tmp_path / "assistant", "held_out": held_out}
    command = [sys.executable, str(SCRIPT), "--smoke", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run([*command, f"--output={output}"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr

    report = json.loads(output.read_text())
    assert not report["failed"] and report["hardware"] and report["provenance"]
    assert {row["system"] for row in report["acceptance"]} == {
        "plain", "lilicorr", "argmax", "lilicorr-tree:nodes=32"
    }  # fmt: skip
    assert all(row["tau"] >= 1 for row in report["acceptance"])
    assert not report["text"]["unusable"] and "left_out" not in report["text"]
    at = {(row["batch"], row["system"]): row for row in report["text"]["rows"]}
    batched = {"plain", "plain:cache=static", "lilicorr", "lilicorr:scoring=eager", "lilicorr:cache=static"}
    assert {name for size, name in at if size == 2} == batched
    assert {name for size, name in at if size == 1} == batched | {"stock-loop", "transformers-dflash"}
    assert all(row["tokens_per_second"] > 0 for row in at.values())
    shape = report["tiny"]
    assert shape["scoring"]["eager"] == {"same_candidates": True, "largest_score_difference": 0}
    assert shape["scoring"]["cuda_graph"] == "not measured"
    for heads in (shape["heads"]["1"], shape["heads"]["2"]):
        assert {"LiLiCorr, eager", "Domino"} < {head["name"] for head in heads}
        assert all(head["milliseconds"] > 0 for head in heads)
    assert [part["name"] for part in shape["profile"]["parts"]] == list(PARTS)
    assert [draft["name"] for draft in shape["profile"]["drafts"]] == ["whole draft, eager"]
    assert "minutes, by a guess" in done.stderr and "batches of 2 took" in done.stderr


def test_without_a_gpu_it_says_so(tmp_path):
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "speed.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=600)
    assert done.returncode == 2 and "there is no GPU" in done.stderr
