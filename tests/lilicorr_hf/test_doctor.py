"""The doctor finds nothing at the shipped pair, and names each silent fault that is put into it."""

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lilicorr_hf import DSparkModel, LiLiCorrDraftModel, cli, doctor
from lilicorr_hf.doctor import PROMPTS, check_template, examine, read_answers, write_probe
from lilicorr_hf.measure import Divergence, encode, tie_gap
from lilicorr_hf.modeling import drafting_lilicorr
from lilicorr_hf.modeling.target_lilicorr import tapped_states
from lilicorr_hf.pairs import CHECKPOINTS


@pytest.fixture(scope="module")
def answers(smollm2_pair):
    model, tokenizer, _ = smollm2_pair
    return read_answers(model, tokenizer, PROMPTS[:2], 40)


def faults(smollm2, answers, assistant=None) -> dict[str, str]:
    model, tokenizer, shipped = smollm2
    findings = list(examine(model, tokenizer, assistant or shipped, answers, CHECKPOINTS / "smollm2-135m"))
    return {finding.check: finding.words for finding in findings if finding.fault}


def changed(assistant, **config):
    """The same weights under a config that states something else."""
    other = LiLiCorrDraftModel(type(assistant.config).from_dict(assistant.config.to_dict() | config))
    other.load_state_dict(assistant.state_dict())
    return other.to(assistant.dtype).eval()


def test_shipped_pair_is_healthy(smollm2, answers):
    assert faults(smollm2, answers) == {}


def test_a_drafter_of_whole_blocks_is_examined_up_to_the_end_of_an_answer(smollm2):
    """DSpark's drafts have as many tokens as a block has positions."""
    model, tokenizer, shipped = smollm2
    torch.manual_seed(0)
    dspark = DSparkModel(shipped.config).to(shipped.dtype).eval()
    for length in range(20, 26):
        answers = read_answers(model, tokenizer, PROMPTS[:1], length)
        checks = {finding.check for finding in examine(model, tokenizer, dspark, answers)}
        assert "cached drafts" in checks and "acceptance" in checks


def test_no_block_to_compare_is_said(smollm2, answers):
    """As where every text parts in its first block."""
    found = doctor.check_cached_drafts(smollm2[2], None, answers, [([], math.inf) for _ in answers])
    assert not found.fault and found.words.startswith("no block to compare")


@pytest.mark.parametrize("ids", [[2, 15, 28], [0, 13, 26]])
def test_off_by_one_layers_in_the_config(smollm2, answers, ids):
    found = faults(smollm2, answers, changed(smollm2[2], target_layer_ids=ids))
    assert "off-by-one layers" in found["probe"] and f"[1, 14, 27], not {ids}" in found["probe"]


def test_off_by_one_layers_in_the_reading(smollm2, answers, monkeypatch):
    """States of the layers before, which the shipped drafts are hardly worse for."""
    monkeypatch.setattr(doctor, "tapped_states", lambda states, ids: tapped_states(states, [i - 1 for i in ids]))
    forward = type(smollm2[0]).forward
    every = {"output_hidden_states": True}
    monkeypatch.setattr(type(smollm2[0]), "forward", lambda self, **kwargs: forward(self, **kwargs | every))
    assert "off-by-one" in faults(smollm2, answers)["taps"]


@pytest.mark.parametrize("base", [1e4, 1e6])
def test_wrong_rope_base(smollm2, answers, base):
    rope = {"rope_type": "default", "rope_theta": base}
    found = faults(smollm2, answers, changed(smollm2[2], rope_parameters=rope))
    assert f"rope_theta 100000, not {base:g}" in found["probe"]


def test_other_weights(smollm2, answers):
    assistant = copy.deepcopy(smollm2[2])
    with torch.no_grad():
        assistant.norm.weight.mul_(1.5)
    assert "other weights" in faults(smollm2, answers, assistant)["probe"]


def test_half_precision_is_no_fault(smollm2, answers):
    assistant = copy.deepcopy(smollm2[2]).to(torch.bfloat16)
    assert "probe" not in faults(smollm2, answers, assistant)


def test_wrong_anchor_row(smollm2, answers, monkeypatch):
    """A loop that hands over each state a position late."""
    original = drafting_lilicorr.tapped_states
    monkeypatch.setattr(drafting_lilicorr, "tapped_states", lambda *args: original(*args).roll(1, dims=1))
    assert "wrong anchor row" in faults(smollm2, answers)["cached drafts"]


@pytest.mark.parametrize("value, words", [(torch.nan, "not finite"), (0.0, "is 0.0")])
def test_broken_weights(smollm2, answers, value, words):
    assistant = copy.deepcopy(smollm2[2])
    with torch.no_grad():
        assistant.lilicorr.in_head.weight.fill_(value)
    found = faults(smollm2, answers, assistant)
    assert "broken weights" in found["weights"] and "lilicorr.in_head.weight" in found["weights"]
    assert words in found["weights"]


def test_template_mismatch(smollm2, answers):
    tokenizer = copy.deepcopy(smollm2[1])
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    found = faults((smollm2[0], tokenizer, smollm2[2]), answers)
    assert "template mismatch" in found["template"] and "[user] Write a Python" in found["template"]


def test_reasoning_mode(smollm2):
    """Templates that know one: the drafter was trained without, and one that was not is told apart."""
    tokenizer, prompt = copy.deepcopy(smollm2[1]), "Hi"
    think = "{% if enable_thinking %}Think.{% endif %}"
    tokenizer.chat_template = think + tokenizer.chat_template
    off, on = (encode(tokenizer, prompt, thinking=mode)["input_ids"][0].tolist() for mode in (False, True))
    found = [check_template(tokenizer, {"prompt": prompt, "ids": ids, "prompt_length": len(ids)}) for ids in (off, on)]
    assert not found[0].fault and "`enable_thinking=False` only" in found[0].words
    assert found[1].fault and "reasoning mode" in found[1].words


def test_a_template_that_writes_the_day_of_another_day(smollm2):
    tokenizer = copy.deepcopy(smollm2[1])
    plain = tokenizer.chat_template
    tokenizer.chat_template = "Today: 26 Jul 2024\n" + plain
    ids = encode(tokenizer, "Hi")["input_ids"][0].tolist()
    probe = {"prompt": "Hi", "ids": ids, "prompt_length": len(ids)}
    for words, fault in (("Today", False), ("Now", True)):
        tokenizer.chat_template = words + ": {{ strftime_now('%d %b %Y') }}\n" + plain
        assert check_template(tokenizer, probe).fault == fault


def test_ties_of_half_precision_are_no_fault(smollm2, answers, monkeypatch):
    """Text that parts where the two best tokens are closer than the dtype can tell."""
    for gap, fault in ((0.1, False), (2.0, True)):
        parted = Divergence(3, 5, 6, gap, tie_gap(torch.bfloat16))
        monkeypatch.setattr(doctor, "first_divergence", lambda *args, parted=parted: parted)
        assert ("text" in faults(smollm2, answers[:1])) == fault


def test_probe_is_written_and_read(smollm2, answers, tmp_path):
    model, tokenizer, assistant = smollm2
    write_probe(model, tokenizer, assistant, tmp_path)
    found = list(examine(model, tokenizer, assistant, answers[:1], tmp_path))
    assert any(finding.check == "probe" and "repeat it" in finding.words for finding in found)
    words = [f.words for f in examine(model, tokenizer, assistant, answers[:1]) if f.check == "probe"]
    assert len(words) == 1 and "not checked" in words[0]


def test_pair_that_does_not_fit_is_named(smollm2, answers):
    found = faults(smollm2, answers, changed(smollm2[2], num_target_layers=32))
    assert "num_target_layers" in found["pairing"] and len(found) == 1


def test_command_exits_with_1_on_a_fault(smollm2, tmp_path):
    folder = Path(shutil.copytree(CHECKPOINTS / "smollm2-135m", tmp_path / "assistant"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mask_token_id": 2}))
    result = CliRunner().invoke(cli.app, ["doctor", "smollm2-135m", str(folder), "--max-new-tokens", "12"])
    assert result.exit_code == 1 and "mask token 2" in result.output
