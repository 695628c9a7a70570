"""Traces: what `record(lattice=True)` keeps, and that JSON gives it back."""

import copy
import json

import pytest
import torch
from rich.console import Console
from tiny import tiny_assistant, tiny_target

import lilicorr_hf
from lilicorr_hf import DFlashModel, LiLiCorrDraftModel
from lilicorr_hf.demo import BlockTrace, Trace
from lilicorr_hf.demo.page import EXAMPLE_NAMES, EXAMPLES
from lilicorr_hf.demo.terminal import outcomes, render, visible
from lilicorr_hf.demo.trace import token_text
from lilicorr_hf.measure import encode


BLOCK = 5


class Numbers:
    """The tokenizer of a target whose tokens are numbers."""

    def decode(self, ids):
        return "".join(f" {i}" for i in ids)

    def convert_ids_to_tokens(self, token):
        return f" {token}"


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def recorded(target, assistant, length=30, **kwargs):
    """Output ids without the prompt, and the recording."""
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    with lilicorr_hf.record(lattice=True) as recording:
        output = target.generate(prompt, assistant_model=assistant, max_new_tokens=length, do_sample=False, **kwargs)
    return output[0, 5:].tolist(), recording


@pytest.mark.parametrize("model_class", [LiLiCorrDraftModel, DFlashModel])
def test_blocks_hold_the_text_and_where_the_draft_met_it(target, model_class):
    ids, recording = recorded(target, tiny_assistant(1, model_class))
    trace = Trace.from_recording(recording, Numbers(), title="numbers")
    position = 0
    for block in trace.blocks:
        assert block.anchor == ids[position]
        assert block.target == ids[position + 1 : position + 2 + len(block.candidates)]
        assert outcomes(block.walk_path[: block.drafted], block.target).count("accepted") == block.accepted
        position += block.accepted + 1
    assert position == len(ids) - 1 and trace.text == Numbers().decode(ids)
    assert trace.tau == pytest.approx(recording.tau)


def test_lattice_is_the_one_that_was_walked(target):
    _, recording = recorded(target, tiny_assistant(1))
    trace = Trace.from_recording(recording, Numbers(), title="numbers")
    for block in trace.blocks:
        if not block.candidates:
            continue
        start, pair = torch.tensor([block.start_scores]), torch.tensor([block.pair_scores])
        assert lilicorr_hf.greedy_walk(start, pair)[0].tolist() == block.walk
        log_probs = torch.tensor(block.log_probs)
        assert log_probs.shape == (BLOCK - 1, 3) and (log_probs.diff(dim=-1) <= 0).all() and (log_probs < 0).all()
        assert block.argmax_path == [slot[0] for slot in block.candidates]
        for slot, rank in enumerate(block.coverage):
            assert (
                block.target[slot] not in block.candidates[slot]
                if rank is None
                else (block.candidates[slot][rank] == block.target[slot])
            )
        assert block.draft_seconds > 0 and block.verify_seconds > 0


def test_plain_drafter_gives_one_candidate_and_no_scores(target):
    _, recording = recorded(target, tiny_assistant(1, DFlashModel))
    block = Trace.from_recording(recording, Numbers(), title="numbers").blocks[0]
    assert [len(slot) for slot in block.candidates] == [1] * (BLOCK - 1)
    assert block.start_scores is None and block.pair_scores is None and block.log_probs is None


def test_recording_keeps_no_lattice_unless_asked(target):
    prompt = torch.tensor([[3, 1, 4]])
    with lilicorr_hf.record() as recording:
        target.generate(prompt, assistant_model=tiny_assistant(1), max_new_tokens=12, do_sample=False)
    block = recording.blocks[0]
    assert (block.anchor_id, block.draft_ids, block.verified_ids, block.lattice) == (None, None, None, None)
    with pytest.raises(ValueError, match=r"record\(lattice=True\)"):
        Trace.from_recording(recording, Numbers(), title="none")


def test_two_calls_are_not_one_trace(target):
    with lilicorr_hf.record(lattice=True) as recording:
        for _ in range(2):
            target.generate(torch.tensor([[3]]), assistant_model=tiny_assistant(), max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="2 were recorded"):
        Trace.from_recording(recording, Numbers(), title="two")


def test_a_batch_is_not_one_trace(target):
    with lilicorr_hf.record(lattice=True) as recording:
        target.generate(torch.tensor([[3], [5]]), assistant_model=tiny_assistant(), max_new_tokens=9, do_sample=False)
    with pytest.raises(ValueError, match="a batch was recorded"):
        Trace.from_recording(recording, Numbers(), title="batch")


def test_json_round_trip(target, tmp_path):
    _, recording = recorded(target, tiny_assistant(1))
    about = {"title": "π", "prompt": "</script>", "target": "tiny", "logit_scale": 8.0, "seconds": 1.5}
    trace = Trace.from_recording(recording, Numbers(), **about)
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    data = json.loads((tmp_path / "trace.json").read_text())
    block = data["blocks"][0]
    assert block["bonus"] == trace.blocks[0].bonus and block["coverage"] == trace.blocks[0].coverage


def test_a_block_of_the_paper_s_size_takes_a_few_kilobytes(tmp_path):
    target = tiny_target("llama")
    _, recording = recorded(target, tiny_assistant(1, block_size=16, candidate_topk=8))
    trace = Trace.from_recording(recording, Numbers(), title="sixteen")
    trace.save(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size / len(trace.blocks) < 10_000


def test_text_of_blocks_joins_where_a_character_spans_two(smollm2):
    """An emoji is several byte tokens: it appears whole, in the block that ends it."""
    _, tokenizer, _ = smollm2
    ids = tokenizer("Hi 🐈 cat").input_ids
    trace = Trace(title="emoji")
    for anchor, token in zip(ids, ids[1:], strict=False):
        trace.append(BlockTrace(anchor, [[token]], [0], 1, 0, [token]), tokenizer)
    assert trace.text == "Hi 🐈 cat"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(block.text for block in trace.blocks)
    halves = [trace.tokens[i] for i in ids if "\\x" in trace.tokens[i]]
    assert halves == [r" \xf0\x9f", r"\x90", r"\x88"]
    assert token_text(tokenizer, tokenizer(" cat").input_ids[0]) == " cat"


def test_real_trace_decodes_to_the_answer(smollm2):
    model, tokenizer, assistant = smollm2
    inputs = encode(tokenizer, "What is the capital of France?")
    chains = lilicorr_hf.block_decoding(assistant, tree_budget=0)
    with lilicorr_hf.record(lattice=True) as recording:
        output = model.generate(**inputs, custom_generate=chains, max_new_tokens=12, do_sample=False)
    trace = Trace.from_recording(recording, tokenizer, title="France")
    assert trace.text == tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert all(len(slot) == 8 for block in trace.blocks for slot in block.candidates)


@pytest.fixture
def figure1():
    return json.loads((EXAMPLES / "figure1.json").read_text())


def test_figure_1_is_the_paper_s():
    trace = Trace.load(EXAMPLES / "figure1.json")
    (block,) = trace.blocks
    words = lambda ids: "".join(trace.tokens[i] for i in [block.anchor, *ids])  # noqa: E731
    assert words(block.argmax_path) == "The dog meows sweetly"
    assert words(block.walk_path) == "The cat meows softly"
    meows = 0
    assert [row[meows] / trace.logit_scale for row in block.pair_scores[0]] == [0.34, 0.81, 0.22]
    start, pair = torch.tensor([block.start_scores]), torch.tensor([block.pair_scores])
    assert lilicorr_hf.greedy_walk(start, pair)[0].tolist() == block.walk


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_examples_load_and_say_where_they_come_from(name):
    trace = Trace.load(EXAMPLES / f"{name}.json")
    assert trace.blocks and trace.title and trace.note and trace.text.startswith(trace.opening)


def damage(data, path, value):
    data = copy.deepcopy(data)
    *parents, last = path
    place = data
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    "path, value, words",
    [
        (["schema"], "other", "Not a trace"),
        (["version"], 2, "version 2; this program reads 1"),
        (["blocks"], None, "incomplete or damaged"),
        (["blocks", 0, "anchor"], None, "incomplete or damaged"),
        (["blocks", 0, "candidates", 1], [4, 5], "slots differ"),
        (["blocks", 0, "walk", 2], 3, "leaves the lattice"),
        (["blocks", 0, "pair_scores"], [[[1.0]]], "pair_scores are not"),
        (["blocks", 0, "start_scores", 0], float("nan"), "start_scores are not"),
        (["blocks", 0, "log_probs", 0, 0], "high", "log_probs are not"),
        (["blocks", 0, "accepted"], 4, "more tokens accepted than drafted"),
        (["blocks", 0, "target"], [2], "target's tokens are missing"),
        (["tokens", "9"], None, "a token has no text"),
    ],
)
def test_damaged_traces_are_named(figure1, tmp_path, path, value, words):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(damage(figure1, path, value)))
    with pytest.raises(ValueError, match=words) as error:
        Trace.load(file)
    assert "bad.json" in str(error.value)


@pytest.mark.parametrize(
    "content, words", [(b"{", "not JSON"), (b"\xff\xfe\x00", "not a text file"), (b"[]", "Not a")]
)
def test_files_that_are_no_trace_are_named(tmp_path, content, words):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        Trace.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "text, shown",
    [(" cat", "·cat"), ("  ", "␣␣"), ("\n", "↵"), ("a\u200bb", "a⟨U+200B⟩b"), ("\x1b[31m", "⟨U+001B⟩[31m"), ("", "")],
)
def test_invisible_characters_are_shown(text, shown):
    assert visible(text) == shown


def test_terminal_shows_every_block(target):
    _, recording = recorded(target, tiny_assistant(1))
    trace = Trace.from_recording(recording, Numbers(), title="numbers")
    trace.tokens = {token: text + "\x1b[2J[red]" for token, text in trace.tokens.items()}
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    for part in render(trace, console.width):
        console.print(part)
    text = console.export_text()
    assert "\x1b" not in text and "⟨U+001B⟩[2J[red]" in text
    assert text.count("Block ") == len(trace.blocks) and "bonus" in text and "rejected" in text


def test_terminal_of_figure_1():
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    for part in render(Trace.load(EXAMPLES / "figure1.json"), console.width):
        console.print(part)
    text = console.export_text()
    assert "The cat meows softly." in text and "3 of 3 accepted" in text
    assert ["1", "·dog", "·cat", "33%", "→", "75%", "accepted", "·cat", "·dog", "·bird"] == next(
        line.split() for line in text.splitlines() if "33%" in line
    )
