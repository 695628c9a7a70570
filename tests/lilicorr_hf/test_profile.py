"""`lilicorr profile`: the parts of a block, on random weights."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tiny import tiny_assistant, tiny_target
from typer.testing import CliRunner

from lilicorr_hf import DFlashModel
from lilicorr_hf.cli import app
from lilicorr_hf.profile import PARTS, SHAPES, profile, random_pair, weights


SCRIPT = Path(__file__).parent.parent / "gpu" / "speed.py"


def test_parts_add_up_and_are_filed_and_drawn(tmp_path):
    numbers, picture = tmp_path / "profile.json", tmp_path / "profile.svg"
    options = ["--shape", "tiny", "--rounds", "2", "--context", "20", "--output", numbers, "--picture", picture]
    result = CliRunner().invoke(app, ["profile", *map(str, options)])
    assert result.exit_code == 0, result.output
    report = json.loads(numbers.read_text())
    assert [part["name"] for part in report["parts"]] == list(PARTS)
    assert sum(part["percent"] for part in report["parts"]) == pytest.approx(100)
    assert sum(part["milliseconds"] for part in report["parts"]) == pytest.approx(report["total_milliseconds"])
    assert all(part["milliseconds"] > 0 for part in report["parts"])
    assert report["context"] == 20 and report["provenance"]["target"] == "tiny, random"
    drawn = "".join(ElementTree.parse(picture).getroot().itertext())
    assert drawn is not None and all(name in result.output for name in PARTS)


@pytest.mark.parametrize(("shape", "parameters"), [("qwen3-8b", 36_758_794), ("qwen3-4b", 32_040_202)])
def test_named_shapes_are_the_papers(shape, parameters):
    target, assistant = random_pair(shape, "meta", torch.bfloat16)
    read = weights(target, assistant)
    assert read["head"] == 2 * parameters
    assert assistant.config.block_size == 16 and len(assistant.config.target_layer_ids) == 5
    assert read["lm_head"] == 2 * 151936 * assistant.config.hidden_size
    assistant.check_target(target)


def test_an_unknown_shape_is_named():
    result = CliRunner().invoke(app, ["profile", "--shape", "gpt-5"])
    assert result.exit_code == 2
    with pytest.raises(ValueError, match="no shape 'gpt-5'.*tiny"):
        random_pair("gpt-5", "cpu", torch.float32)
    assert "tiny" in SHAPES


def test_the_prepared_gpu_run_works_small_on_a_cpu(tmp_path):
    out = tmp_path / "speed.json"
    command = [sys.executable, str(SCRIPT), "--smoke", "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["tiny"]["scoring"]["eager"]["ms"] > 0
    assert [part["name"] for part in report["tiny"]["profile"]["parts"]] == list(PARTS)
    assert report["hardware"] and report["provenance"]["versions"]["torch"]


def test_an_assistant_without_the_head_is_refused():
    target, assistant = tiny_target("llama").float(), tiny_assistant(model_class=DFlashModel)
    with pytest.raises(ValueError, match="DFlashModel has others"):
        profile(target, assistant)
