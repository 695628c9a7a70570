"""No row is lost or repeated however a run ends, and outputs and settings that do not fit are refused."""

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from regeneration import TEMPLATE, arguments, plain_answer, read_rows, write_rows

from lilicorr_hf.training.regenerate import RegenerateArguments, complete_pieces, lock, regenerate


def untorn(model, tokenizer, prompts, output: str) -> tuple[RegenerateArguments, bytes]:
    args = arguments(prompts, output)
    regenerate(args, model, tokenizer)
    return args, Path(args.output).read_bytes()


@pytest.mark.parametrize("output", ["out.jsonl.gz", "out.jsonl"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.97, 1.0])
def test_resume_after_a_cut_anywhere(model, tokenizer, prompts, output, share):
    args, whole = untorn(model, tokenizer, prompts, output)
    Path(args.output).write_bytes(whole[: int(share * len(whole))])
    report = regenerate(args, model, tokenizer)
    assert report.answers + report.already_done == 30
    assert sorted(map(json.dumps, read_rows(args.output))) == sorted(
        json.dumps(json.loads(line))
        for line in (gzip.decompress(whole) if output.endswith(".gz") else whole).splitlines()
    )
    assert regenerate(args, model, tokenizer).answers == 0


def test_resume_of_lines_completes_a_half_written_conversation(model, tokenizer, tmp_path):
    turn = {"role": "user", "content": "w1"}
    talk = [turn, {"role": "assistant", "content": "x"}, turn]
    source = write_rows(tmp_path / "in.jsonl", [{"id": f"c{i}", "messages": talk} for i in range(4)])
    args, whole = untorn(model, tokenizer, source, "out.jsonl")
    lines = whole.splitlines(keepends=True)
    Path(args.output).write_bytes(b"".join(lines[:5]))
    assert regenerate(args, model, tokenizer).answers == 4
    assert sorted(Path(args.output).read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_damage_inside_the_output_is_reported(model, tokenizer, prompts):
    args, whole = untorn(model, tokenizer, prompts, "out.jsonl.gz")
    Path(args.output).write_bytes(whole[:40] + b"\0\0\0\0" + whole[44:])
    with pytest.raises(ValueError, match=r"out\.jsonl\.gz is damaged after byte 0"):
        regenerate(args, model, tokenizer)


def test_sigkill_and_resume(model, tokenizer, prompts):
    """A process killed between writes, started again with the same command until it gets through."""
    target = prompts.parent / "target"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    args = arguments(prompts, target=str(target), cohort_size=2, max_new_tokens=100, loop_period=0)
    names = (
        "target",
        "dataset",
        "output",
        "cohort_size",
        "max_new_tokens",
        "max_prompt_tokens",
        "loop_period",
        "dtype",
    )
    flags = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
    command = [sys.executable, "-m", "lilicorr_hf.training.regenerate", *flags]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    output = Path(args.output)
    deadline = time.monotonic() + 120
    while not (output.exists() and output.stat().st_size) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    first.kill()
    assert first.wait() in (-signal.SIGKILL, 0)
    before = len(read_rows_of_complete_members(output))
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(finished.stdout)["already_done"] == before > 0
    rows = read_rows(args.output)
    assert sorted(row["id"] for row in rows) == sorted(f"p{i}" for i in range(30))
    for row in rows[::7]:
        assert (row["response_ids"], row["stop"]) == plain_answer(model, row["prompt_ids"], args)


def read_rows_of_complete_members(path: Path) -> list[dict]:
    with path.open("rb") as file:
        return [json.loads(line) for _, text in complete_pieces(file, True) for line in text.splitlines()]


def test_two_writers_are_refused(model, tokenizer, prompts):
    args = arguments(prompts)
    with open(args.output, "ab") as file:
        lock(file, Path(args.output))
        with pytest.raises(ValueError, match="another process is writing"):
            regenerate(args, model, tokenizer)


def test_other_settings_are_refused(model, tokenizer, prompts):
    with pytest.raises(ValueError, match="exceed the 512 positions"):
        regenerate(arguments(prompts, max_prompt_tokens=473), model, tokenizer)
    args = arguments(prompts, limit=1)
    regenerate(args, model, tokenizer)  # an output without rows does not bind to the settings of a failed try
    with pytest.raises(ValueError, match="target was 'tiny', is now 'other'"):
        regenerate(arguments(prompts, limit=1, target="other"), model, tokenizer)
    with pytest.raises(ValueError, match=r"temperature was 0\.0, is now 0\.5; seed was None, is now 0"):
        regenerate(arguments(prompts, limit=1, temperature=0.5), model, tokenizer)
    assert regenerate(arguments(prompts, limit=2, seed=7), model, tokenizer).answers == 1  # neither matters to greedy
    Path(args.output + ".meta.json").unlink()
    with pytest.raises(ValueError, match=r"exists without out\.jsonl\.gz\.meta\.json"):
        regenerate(args, model, tokenizer)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_another_dataset_is_not_mixed_into_an_output(name, model, tokenizer, prompts, tmp_path):
    """Rows without an id are counted, and would be taken for those of the first dataset."""
    for dataset, text in (("one", "w1 w2"), ("two", "w3")):
        (tmp_path / f"{dataset}.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    output = str(tmp_path / name)
    regenerate(arguments(tmp_path / "one.jsonl", output=output), model, tokenizer)
    before = Path(output).read_bytes()
    with pytest.raises(ValueError, match="answer to another question as '0'.*another dataset"):
        regenerate(arguments(tmp_path / "two.jsonl", output=output), model, tokenizer)
    assert Path(output).read_bytes() == before


def test_a_target_without_chat_template_is_refused(model, tokenizer, prompts):
    tokenizer.chat_template = None
    try:
        with pytest.raises(ValueError, match="no chat template"):
            regenerate(arguments(prompts), model, tokenizer)
    finally:
        tokenizer.chat_template = TEMPLATE


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("dtype", "int8"), ("output", "rows.parquet")],
)
def test_bad_arguments_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        arguments(Path("in.jsonl"), **{field: value})
