"""The command line, as a user runs it."""

import json

import pytest
from tiny import tiny_assistant, tiny_target
from typer.testing import CliRunner

from lilicorr_hf.cli import app


def lilicorr(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_help_names_every_command():
    result = lilicorr("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in ("generate", "fetch-target", "bench"))


def test_generate_streams_text_then_a_table(smollm2):
    result = lilicorr("generate", "Count from one to five.", "--max-new-tokens", 12, "--rounds", 1)
    assert result.exit_code == 0, result.output
    text, table = result.output.split("┏", 1)
    assert len(text.split()) >= 3
    assert "identical text" in table and "yes" in table and "tokens per pass" in table


def test_generate_json(smollm2):
    result = lilicorr("generate", "Count from one to five.", "--max-new-tokens", 12, "--rounds", 1, "--json")
    report = json.loads(result.stdout)
    assert report["identical"] is True and report["plain_target_passes"] == report["tokens"]
    assert report["assisted_target_passes"] <= report["plain_target_passes"] and report["tau"] >= 1


def test_generate_prints_where_texts_part_and_how_close_it_was(smollm2, monkeypatch):
    from lilicorr_hf import measure

    original = measure.run_generate

    def misread(*args, assistant_model=None, **kwargs):
        run = original(*args, assistant_model=assistant_model, **kwargs)
        if assistant_model is not None and kwargs["max_new_tokens"] == 6:
            run.rows[0][2] += 1
        return run

    monkeypatch.setattr(measure, "run_generate", misread)
    arguments = ("generate", "Hi", "--max-new-tokens", 6, "--rounds", 1, "--dtype", "bfloat16")
    report = json.loads(lilicorr(*arguments, "--json").stdout)
    parted = report["divergence"]
    assert not report["identical"] and parted["index"] == 2 and parted["assisted"] == parted["plain"] + 1
    assert parted["gap"] >= 0 and parted["limit"] == pytest.approx(1.0)
    table = lilicorr(*arguments).output
    assert "token 3" in table and f"{parted['gap']:.1e}" in table


def test_generate_sampled_claims_no_identity(smollm2):
    result = lilicorr(
        "generate", "Hi", "--max-new-tokens", 6, "--rounds", 1, "--json", "--temperature", 0.8, "--no-chat"
    )
    assert json.loads(result.stdout)["identical"] is None


def test_fit_tree_tries_weights_and_names_the_best(smollm2, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "Count from one to ten."}\n')
    result = lilicorr("fit-tree", tmp_path / "held_out.jsonl", "--max-new-tokens", 24, "--tree-budget", 8)
    assert result.exit_code == 0, result.output
    assert "DDTree" in result.output and "head only" in result.output and '"tree_weight": ' in result.output


@pytest.fixture
def wrong_assistant(tmp_path):
    tiny_assistant().save_pretrained(tmp_path / "assistant")
    return tmp_path / "assistant"


def test_wrong_pair_is_one_sentence_and_exit_code_2(smollm2, wrong_assistant):
    result = lilicorr("generate", "Hi", "--assistant", wrong_assistant)
    assert result.exit_code == 2
    assert "vocab_size" in result.output and "Traceback" not in result.output


def test_target_may_be_a_path(tmp_path, wrong_assistant):
    tiny_target("llama").save_pretrained(tmp_path / "target")
    result = lilicorr("generate", "Hi", "--target", tmp_path / "target", "--assistant", wrong_assistant)
    assert result.exit_code == 2 and "okenizer" in result.output


def test_unknown_target_to_fetch():
    result = lilicorr("fetch-target", "gpt5")
    assert result.exit_code == 2 and "smollm2-135m" in result.output
