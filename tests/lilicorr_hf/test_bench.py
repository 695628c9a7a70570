"""`lilicorr bench` from files of prompts to tables, on a tiny pair with random weights."""

import json
import re

import pytest
import torch
from regeneration import word_tokenizer, write_rows
from tiny import FaultyOracle, tiny_assistant, tiny_target
from typer.testing import CliRunner

from lilicorr_hf.bench import systems
from lilicorr_hf.bench.plan import Condition, Options, plan
from lilicorr_hf.bench.prompts import lengthen, read_prompts
from lilicorr_hf.bench.runner import ResultFile, Runner, run_items
from lilicorr_hf.bench.systems import Setting, parse_systems
from lilicorr_hf.cli import app
from lilicorr_hf.measure import encode, mean_entropy, run_generate, watch_passes


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target with its tokenizer, and of an assistant."""
    folder = tmp_path_factory.mktemp("pair")
    tiny_target("llama", eos_token_id=2, pad_token_id=0, initializer_range=0.2).save_pretrained(folder / "target")
    tokenizer = word_tokenizer()
    tokenizer.pad_token = "<unk>"
    tokenizer.save_pretrained(folder / "target")
    tiny_assistant().save_pretrained(folder / "assistant")
    return folder


@pytest.fixture
def prompts(tmp_path):
    rows = [{"id": i, "category": "ab"[i >= 4], "messages": chat(f"w{i} w{3 * i} w7")} for i in range(6)]
    return write_rows(tmp_path / "words.jsonl", rows)


def chat(text):
    return [{"role": "user", "content": text}]


def bench(pair, *args):
    options = ["--target", pair / "target", "--assistant", pair / "assistant", *args]
    return CliRunner().invoke(app, ["bench", *map(str, options)])


def runner(pair, options, specs=("lilicorr",)):
    from lilicorr_hf.pairs import load_target

    model, tokenizer = load_target(str(pair / "target"))
    setting = Setting(model, str(pair / "assistant"))
    return Runner(model, tokenizer, parse_systems(list(specs)), setting, options)


def test_run_writes_tables_pictures_and_a_page(pair, prompts, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench numbers -->\nold\n<!-- end -->\nafter\n")
    output = tmp_path / "out" / "numbers.json"
    specs = ("lilicorr", "argmax", "transformers-dflash", "prompt-lookup", "lilicorr:walk=viterbi")
    options = [item for spec in specs for item in ("--system", spec)]
    options += ["--temperatures", "0,1", "--seeds", "1,2", "--batch-sizes", "1,2", "--max-new-tokens", 10]
    result = bench(pair, prompts, "--limit", 4, "--output", output, "--page", page, *options)
    assert result.exit_code == 0, result.output
    numbers = json.loads(output.read_text())
    whole = [row for row in numbers["summary"] if row["category"] is None]
    at = {(row["temperature"], row["batch"], row["system"]): row for row in whole}
    assert {key[2] for key in at if key[:2] == (0, 1)} == {"plain", *specs}
    # transformers' loops take one sequence at a time.
    assert {key[2] for key in at if key[:2] == (0, 2)} == {"plain", "lilicorr", "argmax", "lilicorr:walk=viterbi"}
    assert all(at[0, 1, spec]["identical"] == at[0, 1, spec]["count"] == 4 for spec in specs)
    assert at[1, 1, "lilicorr"]["seeds"] == 2 and "identical" not in at[1, 1, "lilicorr"]
    assert at[0, 1, "plain"]["tau"] == at[0, 1, "plain"]["speedup"] == 1
    assert 0 <= at[0, 1, "lilicorr"]["coverage"] <= 1
    assert at[0, 1, "lilicorr"]["oracle_tau"] >= at[0, 1, "lilicorr"]["tau"]
    assert "Greedy texts that are the plain one: 32 of 32." in result.output
    assert {row["category"] for row in numbers["summary"]} == {None, "a", "b"}
    session = numbers["provenance"]["sessions"][0]
    assert str(tmp_path) not in json.dumps(numbers["provenance"]) and str(pair) not in output.read_text()
    assert session["versions"]["transformers"] and session["hardware"] and session["data"].keys() == {"words"}
    pictures = {path.name for path in (tmp_path / "images").iterdir()}
    assert pictures == {"page-numbers-tau.png", "page-numbers-dataset.png", "page-numbers-batch.png"}
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
    assert "| words | 1 |" in text and "(images/page-numbers-dataset.png)" in text
    assert (output.with_suffix(".md")).read_text() in text
    assert "Seeds, T=1" in text and "The same weights, other rules, greedy" in text


def test_quick_look_at_the_shipped_pair(smollm2_pair, tmp_path):
    output = tmp_path / "quick.json"
    result = CliRunner().invoke(app, ["bench", "--quick", "--output", str(output)])
    assert result.exit_code == 0, result.output
    rows = {row["system"]: row for row in json.loads(output.read_text())["summary"] if row["category"] is None}
    assert rows.keys() == {"plain", "lilicorr-tree", "lilicorr", "argmax", "transformers-dflash", "prompt-lookup"}
    assert all(row["identical"] + row["ties"] == row["count"] == 2 for name, row in rows.items() if name != "plain")
    # The same drafts, up to the drafter's dtype, counted by our recording and by the target's cache.
    assert rows["transformers-dflash"]["tau"] == pytest.approx(rows["argmax"]["tau"], rel=0.1)
    assert rows["lilicorr-tree"]["tau"] > rows["lilicorr"]["tau"] > 1


def test_wrong_text_fails_the_run(pair, prompts, monkeypatch, tmp_path):
    liar = systems.Method("never says what it should", lambda setting: {"suppress_tokens": list(range(3, 30))})
    monkeypatch.setitem(systems.METHODS, "liar", liar)
    result = bench(pair, prompts, "--limit", 2, "--system", "liar", "--max-new-tokens", 8)
    assert result.exit_code == 1 and "liar, gap" in result.output


def test_a_killed_run_goes_on(pair, prompts, tmp_path):
    """Whole items are kept, a broken line is not, and none is decoded twice."""
    options = Options(systems=("lilicorr",), max_new_tokens=6)
    items, measured, path = plan([prompts], options), [], tmp_path / "results.jsonl"

    def measure(item):
        measured.append(item.key)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return first.measure(item)

    first = runner(pair, options)
    with pytest.raises(KeyboardInterrupt):
        run_items(items, measure, ResultFile(path, {"weights": "a"}, {"commit": "1"}))
    path.write_text(path.read_text() + '{"item": "words/5 T=0')
    results = ResultFile(path, {"weights": "a"}, {"commit": "2"})
    assert len(results.rows) == 2 and [session["commit"] for session in results.sessions] == ["1", "2"]
    assert run_items(items, measure, results)
    assert measured == [*(item.key for item in items[:3]), *(item.key for item in items[2:])]
    again = ResultFile(path, {"weights": "a"}, {"commit": "3"})
    assert [row["item"] for row in again.rows] == [item.key for item in items]
    with pytest.raises(ValueError, match=r"weights a \(now b\)"):
        ResultFile(path, {"weights": "b"}, {"commit": "4"})


def test_no_prompt_begins_after_the_time(pair, prompts, tmp_path):
    options = Options(systems=(), max_new_tokens=4)
    results = ResultFile(tmp_path / "results.jsonl", {}, {})
    heard = []
    assert not run_items(plan([prompts], options), runner(pair, options, ()).measure, results, 0, heard.append)
    assert heard == [] and results.rows == []
    result = bench(pair, prompts, "--minutes", 0)
    assert result.exit_code == 2 and "--minutes" in result.output


def test_systems_take_turns_at_the_first_place(pair, prompts, monkeypatch):
    bench_runner = runner(pair, Options(max_new_tokens=4), ("lilicorr", "argmax"))
    order, run = [], bench_runner.run

    def noted(label, *args):
        order.append((label, len(args)))
        return run(label, *args)

    monkeypatch.setattr(bench_runner, "run", noted)
    for item in plan([prompts], Options())[:3]:
        bench_runner.measure(item)
    warm, timed = order[:3], [label for label, _ in order[3:]]
    assert [label for label, _ in warm] == ["plain", "lilicorr", "argmax"] and {n for _, n in warm} == {3}
    assert timed[::3] == ["plain", "lilicorr", "argmax"] and all(
        set(timed[i : i + 3]) == set(timed) for i in (0, 3, 6)
    )


def test_second_turns_answer_the_plain_text(pair, tmp_path):
    file = write_rows(tmp_path / "talk.jsonl", [{"id": 1, "turns": ["w1 w2", "w3 w4"]}])
    options = Options(max_new_tokens=5)
    bench_runner = runner(pair, options)
    [item] = plan([file], options)
    rows = bench_runner.measure(item)
    inputs = encode(bench_runner.tokenizer, chat("w1 w2"))
    answer = run_generate(bench_runner.model, inputs, max_new_tokens=5, do_sample=False).token_ids
    text = bench_runner.tokenizer.decode(answer, skip_special_tokens=True)
    talk = [*chat("w1 w2"), {"role": "assistant", "content": text}, *chat("w3 w4")]
    lengths = [encode(bench_runner.tokenizer, messages)["input_ids"].shape[1] for messages in (chat("w1 w2"), talk)]
    assert [(row["turn"], row["input_tokens"]) for row in rows] == [(0, lengths[:1]), (1, lengths[1:])]


def test_lengthened_prompts_fall_into_thirds_of_entropy(pair, prompts, tmp_path):
    output = tmp_path / "long.json"
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "too long", "prompt": "w1 " * 40}) + "\n")
    result = bench(pair, prompts, "--lengths", "40,60", "--max-new-tokens", 6, "--full-length", "--output", output)
    assert result.exit_code == 0, result.output
    numbers = json.loads(output.read_text())
    for length in (40, 60):
        rows = sorted((row for row in numbers["rows"] if row["length"] == length), key=lambda row: row["entropy"])
        assert [row["input_tokens"] for row in rows] == [[length]] * 6
        assert {row["systems"]["plain"]["tokens"] for row in rows} == {6}
        found = [row for row in numbers["summary"] if row["length"] == length and row["system"] == "lilicorr"]
        whole = {row["tier"]: row["count"] for row in found if row["category"] is None}
        assert whole == {"low": 2, "mixed": 2, "high": 2}
    assert (tmp_path / "long-length.png").exists()


def test_entropy_is_of_what_the_answer_was_chosen_from(pair):
    model = runner(pair, Options(), ()).model
    ids = torch.tensor([[1, 4, 9, 12]])
    logits = model(input_ids=torch.cat([ids, torch.tensor([[5, 6]])], dim=1)).logits[0, 3:5].double()
    probs = logits.softmax(dim=-1)
    expected = -(probs * probs.log()).sum(dim=-1).mean().item()
    assert mean_entropy(model, ids, [5, 6]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("length", [120, 700])
def test_lengthened_chat_of_a_real_tokenizer(smollm2_pair, tmp_path, length):
    _, tokenizer, _ = smollm2_pair
    texts = ["Was it 3 o'clock? Name naïve cafés.", "def f(x):\n    return x", "One, two; three!"]
    prompts = read_prompts(write_rows(tmp_path / "texts.jsonl", [{"prompt": text} for text in texts]))
    long = lengthen(tokenizer, prompts, 1, length)
    assert length - 4 <= encode(tokenizer, long.chat)["input_ids"].shape[1] <= length
    assert long.question.endswith(texts[1]) and texts[2] in long.question
    with pytest.raises(ValueError, match="more than 20 tokens"):
        lengthen(tokenizer, prompts, 0, 20)


def test_accepted_tokens_are_told_from_the_targets_cache():
    """As recorded, whatever loop decodes."""
    target = tiny_target("llama").float()
    ids = torch.tensor([[1, 5, 9]])
    oracle = FaultyOracle(tiny_assistant().config).eval()
    oracle.answers = [target.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    run = run_generate(target, inputs, assistant_model=oracle, max_new_tokens=30, do_sample=False)
    recorded = run.recording.accepted
    assert run.token_ids == oracle.answers[0][3:33] and len(set(recorded)) > 2
    assert run.target_passes == run.recording.target_passes
    run.recording.calls = 0
    assert run.accepted(3) == recorded


def test_prompt_lookup_may_draft_with_the_prompts_own_pass():
    target = tiny_target("llama").float()
    ids = torch.tensor([[1, 5, 9, 11, 5, 9]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": 12, "do_sample": False}
    run = run_generate(target, inputs, prompt_lookup_num_tokens=3, **options)
    assert run.passes[0].read > 6 and run.token_ids == run_generate(target, inputs, **options).token_ids
    accepted = run.accepted(6)
    assert len(accepted) == run.target_passes and sum(accepted) + len(accepted) == 12
    with watch_passes(target) as passes:
        target(input_ids=ids)
    assert [(step.cached, step.read) for step in passes] == [(0, 6)]


def test_prompts_come_from_every_category_in_turn(tmp_path):
    rows = [{"id": i, "category": "aaabbc"[i], "prompt": f"w{i}"} for i in range(6)]
    found = read_prompts(write_rows(tmp_path / "rows.jsonl", rows))
    assert [prompt.id for prompt in found] == ["0", "3", "5", "1", "4", "2"]


def test_plan_stops_anywhere_with_every_condition_served(prompts, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": f"w{i}"} for i in range(3)])
    options = Options(temperatures=(0.0, 1.0), seeds=(7, 8), batch_sizes=(1, 2))
    items = plan([prompts, other], options, limit=3)
    first = {(item.chosen[0].dataset, item.condition) for item in items[:12]}
    expected = [Condition(0.0, None), Condition(1.0, 7), Condition(1.0, 8)]
    expected += [Condition(c.temperature, c.seed, batch=2) for c in expected]
    assert first == {(name, condition) for name in ("words", "other") for condition in expected}
    assert len(items) == len({item.key for item in items}) == 2 * 3 * (3 + 1)


@pytest.mark.parametrize(
    "rows, options, words",
    [
        ('{"text": "x"}', [], "line 1: expected"),
        ("{", [], "line 1: not JSON"),
        ("", [], "no prompts"),
        ('{"prompt": "w1"}', ["--batch-sizes", "2"], "batch of 2"),
        ('{"prompt": "w1"}', ["--system", "magic"], "Unknown system 'magic'"),
        ('{"prompt": "w1"}', ["--system", "lilicorr:q=3"], "'q=3' is not an option"),
        ('{"prompt": "w1"}', ["--system", "lilicorr:k=x"], "whole number"),
        ('{"prompt": "w1"}', ["--system", "lilicorr:k=9"], r"lie in \[1, 3\]"),
        ('{"prompt": "w1"}', ["--system", "lilicorr:block=9"], r"lie in \[2, 5\]"),
        ('{"prompt": "w1"}', ["--system", "lilicorr:walk=drunk"], "Unknown walk 'drunk'"),
        ('{"prompt": "w1"}', ["--system", "dflash"], "dflash:path=..."),
        ('{"prompt": "w1"}', ["--output", "numbers.txt"], "names a .json file"),
        ('{"prompt": "w1"}', ["--page", "page.md"], "needs `--output`"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(pair, tmp_path, rows, options, words):
    file = tmp_path / "rows.jsonl"
    file.write_text(rows)
    result = bench(pair, file, *options)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert re.search(words, result.output), result.output


def test_files_that_are_not_there(pair, prompts, tmp_path):
    assert "There is no" in bench(pair, tmp_path / "nothing.jsonl").output
    assert "Give JSONL files" in bench(pair).output
    (tmp_path / "copy").mkdir()
    write_rows(tmp_path / "copy" / "words.jsonl", [{"prompt": "w1"}])
    assert "called alike" in bench(pair, prompts, tmp_path / "copy").output


def test_help_lists_what_can_be_measured():
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0 and all(name in result.output for name in systems.METHODS)
