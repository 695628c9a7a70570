"""`lilicorr profile`: the parts of a block, on random weights."""

import functools
import json
from xml.etree import ElementTree

import pytest
import torch
from tiny import tiny_assistant, tiny_target
from typer.testing import CliRunner

from lilicorr_hf import DFlashModel
from lilicorr_hf.choices import drafters_beside, time_choices
from lilicorr_hf.cli import app
from lilicorr_hf.modeling import draft_pass_lilicorr, scoring_lilicorr
from lilicorr_hf.modeling.modeling_dflash2 import DFlash2Model
from lilicorr_hf.modeling.modeling_domino import DominoModel
from lilicorr_hf.modeling.modeling_dspark import DSparkModel
from lilicorr_hf.modeling.target_lilicorr import TargetTables
from lilicorr_hf.profile import PARTS, SHAPES, profile, random_pair, weights
from lilicorr_hf.stopwatch import size


@pytest.fixture
def quick_compiler(monkeypatch):
    """What it compiles is tested elsewhere."""
    for module in (draft_pass_lilicorr, scoring_lilicorr):
        monkeypatch.setattr(module, "compiled", lambda eager: eager)


def test_parts_add_up_and_are_filed_and_drawn(tmp_path, quick_compiler):
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
    names = [choice["name"] for choice in report["choices"]]
    assert names == ["LiLiCorr, eager", "LiLiCorr, compile", "DFlash", "Domino", "DSpark", "DFlash2"]
    drafts = [draft["name"] for draft in report["drafts"]]
    assert drafts == ["whole draft, eager", "whole draft, compile"]
    assert all(choice["milliseconds"] > 0 for choice in report["choices"] + report["drafts"])
    assert all(name in result.output for name in names + drafts)
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


@pytest.mark.parametrize("model_class", [DFlashModel, DominoModel, DSparkModel, DFlash2Model])
def test_other_methods_have_a_head_in_one_part(model_class):
    target, assistant = tiny_target("llama").float(), tiny_assistant(model_class=model_class)
    result = profile(target, assistant, context=9, rounds=2, modes=("eager",))
    names = [part.name for part in result.parts]
    assert names == ["embed", "context", "drafter", "lm_head", "head", "verify", "host"]
    head = next(part for part in result.parts if part.name == "head")
    assert (head.megabytes > 0) == (model_class is not DFlashModel)


def test_a_drafter_of_another_dtype_than_its_target(quick_compiler):
    result = profile(tiny_target("llama").float(), tiny_assistant().bfloat16(), context=9, rounds=2)
    assert [part.name for part in result.parts] == list(PARTS)


def test_the_modes_that_run_here_are_timed(monkeypatch, quick_compiler):
    target, assistant = tiny_target("llama").float(), tiny_assistant()
    drafters = drafters_beside(assistant)
    assert drafters["LiLiCorr"] is assistant
    assert drafters["Domino"].config.gru_hidden_dim == assistant.config.gru_hidden_dim
    take = functools.partial(time_choices, drafters, TargetTables(target), rounds=1, bandwidth=1e9)
    parts = take(batch_size=2)
    assert [part.name for part in parts][:2] == ["LiLiCorr, eager", "LiLiCorr, compile"]
    assert parts[0].megabytes == pytest.approx(size(assistant.lilicorr) / 1e6)

    def fail(eager):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(scoring_lilicorr, "compiled", fail)
    assistant.train().eval()
    assert [part.name for part in take(modes=("compile",))] == ["DFlash", "Domino", "DSpark", "DFlash2"]
