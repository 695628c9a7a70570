"""The same weights in nvidia-modelopt: the same rows and anchors give the same gradients, and the recorded blocks.

`pytest -m peer tests/peers` makes the environment for it on first use.
"""

import json
from pathlib import Path

import pytest
import torch
from goldens import GOLDEN
from record_blocks import record
from safetensors.torch import load_file
from training_speed import Comparison, Workers, modelopt_python

from lilicorr_hf import LiLiCorrDraftModel


pytestmark = pytest.mark.peer
STEPS = 4


@pytest.fixture(scope="module")
def python() -> Path:
    return modelopt_python(Path(".venv-modelopt"))


@pytest.fixture
def rows(tmp_path) -> str:
    """Texts of different lengths, one shorter than the anchors asked for and with blocks that reach past its end."""
    words = "The train leaves at noon and arrives before the sun sets behind the hills of the quiet coast".split()
    answers = [" ".join(words[i % len(words)] for i in range(count)) for count in (90, 12, 40, 200)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "Go on.", "completion": text}) + "\n" for text in answers))
    return str(path)


def compare(comparison: Comparison, python: Path, folder: Path):
    """Results and gradients of each step of both."""
    with Workers(comparison, python, folder) as workers:
        for index in range(comparison.steps):
            results, gradients = {}, {}
            for worker in workers.both:
                file = folder / f"{worker.name}.safetensors"
                results[worker.name] = worker.step(gradients=file)
                gradients[worker.name] = load_file(file)
            yield index, results, gradients


@pytest.mark.parametrize("offline", [False, True])
def test_loss_and_gradients_agree_in_fp32(rows, python, offline, tmp_path):
    comparison = Comparison(rows, STEPS, dtype="float32", learning_rate=0.0, offline=offline)
    for index, results, gradients in compare(comparison, python, tmp_path):
        ours, theirs = results["ours"], results["modelopt"]
        assert (ours["tokens"], ours["blocks"]) == (theirs["tokens"], theirs["blocks"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["terms"] == pytest.approx(theirs["terms"], rel=1e-4, abs=1e-6)
        names = LiLiCorrDraftModel.from_pretrained("lilicorr_hf/checkpoints/smollm2-135m").state_dict().keys()
        assert gradients["ours"].keys() == gradients["modelopt"].keys() == names
        for name, gradient in gradients["ours"].items():
            assert difference(gradient, gradients["modelopt"][name]) < 1e-3, f"{name} in step {index}"


def difference(ours, theirs) -> float:
    """Norm of the difference as a part of the norm."""
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-9)).item()


def test_the_recorded_blocks_are_of_the_shipped_weights(python, tmp_path):
    recording, again = GOLDEN / "smollm2_shipped.safetensors", tmp_path / "again.safetensors"
    record(recording, again, Comparison(rows="", steps=0, dtype="float32"), python)
    expected, actual = load_file(recording), load_file(again)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
