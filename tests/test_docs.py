"""What README and docs tell a reader to type: run here, or marked as not run and still checked for options."""

import contextlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from lilicorr_hf import fetch_target
from lilicorr_hf.cli import app


ROOT = Path(__file__).parent.parent
# What makes a command take seconds where it would take minutes or hours: the last of two equal options counts.
BRIEFLY = {
    "bench": "--limit 1 --max-new-tokens 4 --system lilicorr",
    "doctor": "--max-new-tokens 12",
    "fit-tree": "--limit 1 --max-new-tokens 8",
    "generate": "--max-new-tokens 4 --rounds 1",
    "profile": "--shape tiny --rounds 2",
    "regenerate": "--max_new_tokens 12",
    "trace": "--max-new-tokens 8",
    "train": "--max_hours 1e-6 --max_anchors 2 --num_layers 1 --slot_vocabulary 512 --logging_steps 1 --held_out 0 "
    "--eval_prompts 1 --eval_max_new_tokens 4",
}
PROMPTS = ("Name three colours.", "What is a hash table?")
PAGES = sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
FENCE = re.compile(r"^(?:<!-- (?P<mark>not run: [^>]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass
class Block:
    language: str
    code: str
    run: bool
    line: int


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(
            language=found["language"],
            code=found["code"],
            run=found["mark"] is None,
            line=text[: found.start("code")].count("\n") + 1,
        )
        for found in FENCE.finditer(text)
    ]


def commands(code: str) -> list[list[str]]:
    """Words of each line after a prompt, with continued lines joined."""
    joined = code.replace("\\\n", " ")
    return [shlex.split(line[2:], comments=True) for line in joined.splitlines() if line.startswith("$ ")]


def options_of(name: str) -> set[str]:
    """What a subcommand understands: its own parser's options, or those its help text names; a study trains, too."""
    command = typer.main.get_command(app).commands[name]
    own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if own:
        return own
    with contextlib.suppress(SystemExit):
        result = CliRunner().invoke(app, [name, "--help"])
    passed_on = options_of("train") if name == "study" else set()
    return passed_on | set(re.findall(r"--[\w-]+", result.output))


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page):
    for block in blocks(page):
        for words in commands(block.code) if block.language == "console" else ():
            if words[0] == "lilicorr":
                given = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
                assert given <= options_of(words[1]), f"{page}:{block.line} {words}"


@pytest.fixture
def readers_folder(tmp_path, monkeypatch):
    """What the pages take for granted: the package's folder, a pair under a path, files of prompts, runs of bench."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lilicorr_hf").symlink_to(ROOT / "lilicorr_hf")
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/target").symlink_to(fetch_target("smollm2-135m"))
    (tmp_path / "path/to/assistant").symlink_to(ROOT / "lilicorr_hf/checkpoints/smollm2-135m")
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    for name in ("prompts", "my_prompts", "held_out", "gsm8k", "humaneval"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    for name in ("before", "after"):
        (tmp_path / f"{name}.json").symlink_to("numbers.json")


def briefly(words: list[str]) -> list[str]:
    return words if words[1] == "compare" else words + BRIEFLY.get(words[0], "").split()


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.run and b.language for b in blocks(page))])
def test_blocks_run_in_the_order_of_the_page(page, smollm2_pair, readers_folder):
    """One page is one session: its Python blocks share their names, its commands their folder."""
    names: dict = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.code, page, "exec")
            if block.run:
                exec(code, names)
        elif block.language == "console" and block.run:
            for words in commands(block.code):
                assert words[0] == "lilicorr", f"{page}:{block.line} cannot be run here, and is not marked: {words}"
                result = CliRunner().invoke(app, briefly(words[1:]))
                assert result.exit_code == 0, f"{page}:{block.line} {words}: {result.output}"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]*)", text):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"
