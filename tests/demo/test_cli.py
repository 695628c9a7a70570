"""`lilicorr trace` and `lilicorr demo`, as a user runs them."""

import pytest
from typer.testing import CliRunner

from lilicorr_hf.cli import app
from lilicorr_hf.demo import Trace
from lilicorr_hf.demo.page import EXAMPLES


def lilicorr(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_trace_draws_a_file():
    result = lilicorr("trace", EXAMPLES / "figure1.json")
    assert result.exit_code == 0 and "The cat meows softly." in result.stdout and "rejected" not in result.stdout


def test_trace_runs_a_prompt_and_saves_it(folder, tmp_path):
    pair = ("--target", folder / "target", "--assistant", folder / "assistant")
    about = ("--title", "Words", "--untimed", "--output", tmp_path / "words.json")
    result = lilicorr("trace", "w5 w9", *pair, "--max-new-tokens", 12, *about)
    assert result.exit_code == 0, result.output
    trace = Trace.load(tmp_path / "words.json")
    assert trace.title == "Words" and trace.prompt == "w5 w9" and trace.seconds is None
    assert sum(block.accepted + 1 for block in trace.blocks) == 11
    assert trace.text in " ".join(result.stdout.split())


@pytest.mark.parametrize("content", ["{", '{"schema": "x"}'])
def test_bad_trace_is_one_sentence_and_exit_code_2(tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    result = lilicorr("trace", tmp_path / "bad.json")
    assert result.exit_code == 2 and "bad.json" in result.output and "Traceback" not in result.output


def test_demo_explains_its_options():
    result = lilicorr("demo", "--help")
    assert result.exit_code == 0 and "--assistant" in result.output and "--port" in result.output
