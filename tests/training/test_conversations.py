"""Every answer has the conversation so far as its prompt, and unusable rows and files are named."""

import json
from pathlib import Path

import pytest
from regeneration import arguments, plain_answer, read_rows, write_rows

from lilicorr_hf.training.conversations import plan_cohorts, render
from lilicorr_hf.training.regenerate import regenerate


def test_multi_turn(model, tokenizer, tmp_path):
    conversations = [
        [("system", "w1"), ("user", "w2 w3"), ("assistant", "old"), ("user", "w4"), ("assistant", "old too")],
        [("user", "w5 w6"), ("assistant", "old"), ("user", "w7")],
        [("user", "w8")],
    ]
    rows = [
        {"id": f"c{i}", "messages": [{"role": role, "content": text} for role, text in turns]}
        for i, turns in enumerate(conversations)
    ]
    args = arguments(write_rows(tmp_path / "in.jsonl", rows), loop_period=0)
    regenerate(args, model, tokenizer)
    made = {row["id"]: row for row in read_rows(args.output)}
    assert set(made) == {"c0#0", "c0#1", "c1#0", "c1#1", "c2"}
    assert [m["role"] for m in made["c0#1"]["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert made["c0#1"]["messages"][:3] == made["c0#0"]["messages"]
    assert "category" not in made["c2"]
    for row in made.values():
        assert row["prompt_ids"] == render(tokenizer, row["messages"][:-1])
        assert (row["response_ids"], row["stop"]) == plain_answer(model, row["prompt_ids"], args)
        assert "old" not in json.dumps(row)


def test_long_prompts_are_skipped_and_counted(model, tokenizer, tmp_path):
    turn = {"role": "user", "content": "w1"}
    rows = [
        {"id": "long", "prompt": "w1 " * 50},
        {"id": "grows", "messages": [turn, {"role": "assistant", "content": "x"}, turn]},
        {"id": "fits", "prompt": "w1"},
    ]
    args = arguments(write_rows(tmp_path / "in.jsonl", rows), max_prompt_tokens=6, loop_period=0)
    report = regenerate(args, model, tokenizer)
    assert [row["id"] for row in sorted(read_rows(args.output), key=lambda row: row["id"])] == ["fits", "grows#0"]
    assert (report.answers, report.skipped_long) == (2, 2)
    assert regenerate(args, model, tokenizer).answers == 0


def test_plan_cohorts():
    lengths = dict(enumerate([9, 1, 5, 5, 2, 9, 1, 100]))
    plan = plan_cohorts(lengths, size=3, tokens=20, seed=0)
    assert sorted(index for cohort in plan for index in cohort) == list(range(8))
    assert all(len(c) == 1 or (len(c) <= 3 and len(c) * max(lengths[i] for i in c) <= 20) for c in plan)
    assert plan_cohorts(lengths, 3, 20, 0) == plan
    assert plan_cohorts({}, 3, 20, 0) == []


def test_limit_exclude_and_missing_ids(model, tokenizer, tmp_path):
    rows = [{"prompt": "w1"}, {"prompt": "w2"}, {"prompt": "w3"}, {"id": "named", "prompt": "w4"}, {"prompt": "w5"}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    known = write_rows(tmp_path / "known.jsonl", [{"id": "1"}])
    args = arguments(source, limit=4, exclude=[str(known)])
    assert regenerate(args, model, tokenizer).excluded == 1
    assert sorted(row["id"] for row in read_rows(args.output)) == ["0", "2", "named"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"line 2: the row has no `messages` and no `prompt`, only \['text'\]"),
        ({"prompt": ""}, "line 2: the row has no `messages` and no `prompt`"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "line 2: expected text of a system, user or assistant turn",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "line 2: expected text"),
        ({"messages": ["hello"]}, "line 2: expected text"),
        ({"messages": [{"role": "system", "content": "x"}]}, "line 2: an assistant turn must follow a user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2: an assistant turn must follow a user turn"),
        ({"id": "a", "prompt": "w1"}, "line 2: the id 'a' was used before, at .*line 1"),
        (["a list"], "at line 2: the line is not a JSON object"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    args = arguments(write_rows(tmp_path / "in.jsonl", [{"id": "a", "prompt": "w1"}, row]))
    with pytest.raises(ValueError, match=message):
        regenerate(args)
    assert not Path(args.output).exists()


def test_bad_files_are_named(tmp_path, tokenizer, model):
    with pytest.raises(FileNotFoundError, match=r"no file .*missing\.jsonl"):
        regenerate(arguments(tmp_path / "missing.jsonl"))
    (tmp_path / "torn.jsonl").write_text('{"prompt": "w1"}\n{"pro')
    with pytest.raises(ValueError, match=r"torn\.jsonl, at line 2"):
        regenerate(arguments(tmp_path / "torn.jsonl"))
    (tmp_path / "plain.jsonl.gz").write_text('{"prompt": "w1"}\n')
    with pytest.raises(ValueError, match=r"plain\.jsonl\.gz, at line 1"):
        regenerate(arguments(tmp_path / "plain.jsonl.gz"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl has no rows"):
        regenerate(arguments(tmp_path / "empty.jsonl"))
