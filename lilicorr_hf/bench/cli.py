"""`lilicorr bench` and `lilicorr bench compare`."""

import argparse
import json
import os
import shlex
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lilicorr_hf.measure import encode
from lilicorr_hf.pairs import load_target, named_device, resolve_assistant
from lilicorr_hf.provenance import fingerprint, hardware, made_with, without_folders

from .compare import compare, read_numbers
from .pictures import draw
from .plan import Item, Options, plan
from .prompts import Prompt
from .runner import ResultFile, Runner, run_items
from .statistics import mismatches, overall, summarise
from .systems import METHODS, Setting, System, parse_systems
from .tables import exactness_note, session_note, tables


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

QUICK_PROMPTS = Path(__file__).parent / "quick.jsonl"
QUICK = {"limit": 2, "max_new_tokens": 12}
console, errors = Console(), Console(stderr=True)


def numbers_of(kind: type) -> Any:
    """A parser of comma-separated numbers."""

    def parse(text: str) -> tuple:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def bench_parser() -> argparse.ArgumentParser:
    options = Options()
    systems = "\n".join(f"  {name:20} {method.words}" for name, method in METHODS.items())
    parser = argparse.ArgumentParser(
        prog="lilicorr bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Acceptance length, speed and exactness of draft methods on files of prompts.\n"
        "`lilicorr bench compare A.json B.json` compares two runs.",
        epilog=f"systems, as NAME or NAME:OPTION=VALUE,OPTION=VALUE:\n{systems}",
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="JSONL of messages, turns or prompt, or folders of such files.")
    add("--quick", action="store_true", help="Two built-in prompts, 12 tokens: a look at whether all works.")
    add("--target", default="smollm2-135m", help="A name `fetch-target` knows, a path or a Hub id.")
    add("--assistant", default="smollm2-135m", help="A shipped pair's name, a path or a Hub id.")
    add("--system", action="append", dest="systems", metavar="SPEC", help="What to measure; may be given again. "
        f"By default {', '.join(options.systems)}. Plain decoding always is.")  # fmt: skip
    add("--limit", type=int, help="Prompts of each file, taken from all its categories in turn.")
    add("--minutes", type=float, help="Begin no prompt after so long; the same command goes on later.")
    add("--max-new-tokens", type=int, default=options.max_new_tokens, help="Tokens to generate.")
    add("--temperatures", type=numbers_of(float), default=options.temperatures, help="As in 0,1; 0 is greedy.")
    add("--seeds", type=numbers_of(int), default=options.seeds, help="For temperatures above 0; by default 42,43,44.")
    add("--batch-sizes", type=numbers_of(int), default=options.batch_sizes, help="Sequences at a time, as in 1,2,4.")
    add("--lengths", type=numbers_of(int), default=(), help="Input tokens to lengthen prompts to, as in 512,1024; "
        "prompts that are longer by themselves are left out.")  # fmt: skip
    add("--full-length", action="store_true", help="Go on after the end token, so that all texts are equally long.")
    add("--dtype", default="auto", help="Of target and drafter; by default the target's.")
    add("--device", default="auto", help="By default an accelerator, if there is one.")
    add("--output", type=Path, metavar="FILE.json", help="All numbers; FILE.jsonl, FILE.md and pictures beside it. "
        "A run that was stopped goes on from FILE.jsonl.")  # fmt: skip
    add("--page", type=Path, metavar="PAGE.md", help="Put tables, and pictures from `images` beside it, between "
        "the lines `<!-- bench FILE -->` and `<!-- end -->` of this page.")  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        compare_main(argv[1:])
        return
    args, options, systems = check(argv)
    model, tokenizer = load(args)
    items = plan(args.files, options, args.limit, fits=lambda prompt: fits(prompt, tokenizer, options))
    subject, session = describe(args, argv, options, systems, model)
    longest = 0
    if any({"cache", "yarn"} & system.options.keys() for system in systems):
        longest = options.max_new_tokens + longest_input(items, tokenizer)
    setting = Setting(model, args.assistant, longest)
    runner = Runner(model, tokenizer, systems, setting, options)
    with tempfile.TemporaryDirectory() as scratch:
        output = args.output or Path(scratch) / "numbers.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        results = ResultFile(output.with_suffix(".jsonl"), subject, session)
        complete = run_with_progress(items, runner, results, args.minutes)
        keys = {item.key for item in items}
        results.rows = [row for row in results.rows if row["item"] in keys]
        report(results, subject, args.output, args.page)
    if not complete:
        errors.print("Out of time: the same command goes on with the prompts that are left.")
    if wrong := mismatches(results.rows):
        errors.print(f"Text differs from plain decoding beyond ties of the target's two best tokens: {wrong[:5]}")
        raise SystemExit(1)


def check(argv: list[str]) -> tuple[argparse.Namespace, Options, list[System]]:
    """What is to be measured, and how.

    Raises:
        `ValueError`: for what can be seen to be wrong before anything is loaded.
    """
    args = parse(argv)
    options = options_of(args)
    if args.page is not None:
        split_at_marks(args.page, args.output.stem)
    return args, options, parse_systems(list(options.systems))


def parse(argv: list[str]) -> argparse.Namespace:
    """
    Raises:
        `ValueError`: for files that are not there, and options that need others.
    """
    parser = bench_parser()
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    if args.quick:
        args.files = args.files or [QUICK_PROMPTS]
    files = []
    for path in args.files:
        if not path.exists():
            raise ValueError(f"There is no {path}.")
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError("Give JSONL files of prompts, or a folder of them, or `--quick`.")
    if args.output is not None and args.output.suffix != ".json":
        raise ValueError(f"`--output` names a .json file, got {args.output}.")
    if args.page is not None and args.output is None:
        raise ValueError("`--page` needs `--output`: the page's tables are named for it.")
    args.files = files
    return args


def options_of(args: argparse.Namespace) -> Options:
    return Options(
        systems=tuple(args.systems or Options.systems),
        max_new_tokens=args.max_new_tokens,
        temperatures=args.temperatures,
        seeds=args.seeds,
        batch_sizes=args.batch_sizes,
        lengths=args.lengths,
        full_length=args.full_length,
    )


def fits(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", options: Options) -> bool:
    """Whether a prompt can be lengthened to all lengths: it is not longer by itself."""
    return not options.lengths or encode(tokenizer, prompt.chat)["input_ids"].shape[1] <= min(options.lengths)


def load(args: argparse.Namespace) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    return load_target(args.target, dtype=args.dtype, device_map=named_device(args.device))


def longest_input(items: list[Item], tokenizer: "PreTrainedTokenizerBase") -> int:
    lengths = [item.condition.length for item in items if item.condition.length is not None]
    if lengths:
        return max(lengths)
    return max(encode(tokenizer, prompt.chat)["input_ids"].shape[1] for item in items for prompt in item.chosen)


def describe(
    args: argparse.Namespace, argv: list[str], options: Options, systems: list[System], model: "PreTrainedModel"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is measured, which a run that goes on must share, and the provenance of this session."""
    weights = sorted(Path(resolve_assistant(args.assistant)).glob("*.safetensors"))
    others = {system.label: fingerprint(*files) for system in systems if (files := system.weights())}
    subject: dict[str, Any] = {
        "target": without_folders(args.target),
        "assistant": without_folders(args.assistant),
        "weights": fingerprint(*weights) if weights else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "systems": [system.label for system in systems],
        "max_new_tokens": options.max_new_tokens,
        "full_length": options.full_length,
        "hardware": hardware(model.device),
    }
    if others:
        subject["other_weights"] = others
    session = {
        "command": shlex.join(["lilicorr", "bench", *map(without_folders, argv)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": {file.stem: fingerprint(file) for file in args.files},
    }
    return subject, session | made_with(model.device)


def run_with_progress(items: list[Item], runner: Runner, results: ResultFile, minutes: float | None) -> bool:
    clocks = (TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *clocks, console=errors)
    with bar as progress:
        task = progress.add_task("prompts", total=len(items))

        def advance(item: Item) -> None:
            progress.update(task, advance=1, description=item.chosen[0].dataset)

        return run_items(items, runner.measure, results, minutes, advance)


def report(results: ResultFile, subject: dict[str, Any], output: Path | None, page: Path | None) -> None:
    """Prints the tables; writes JSON, markdown, pictures and the page's part if there is somewhere to."""
    if not results.rows:
        raise ValueError("Not one prompt was decoded in time; give more `--minutes`.")
    provenance = {"subject": subject, "sessions": results.sessions}
    summaries, over_all = summarise(results.rows), overall(results.rows)
    found = tables(summaries, over_all)
    for table in found:
        if not table.wide:
            console.print(table.rich())
    console.print(exactness_note(summaries))
    if output is None:
        return
    numbers = {"provenance": provenance, "summary": summaries, "overall": over_all, "rows": results.rows}
    output.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    text = "\n".join([session_note(provenance) + "\n", *(table.markdown() for table in found)])
    output.with_suffix(".md").write_text(text, encoding="utf-8")
    stem = output.with_suffix("") if page is None else page.parent / "images" / f"{page.stem}-{output.stem}"
    pictures = draw(summaries, stem)
    if page is not None:
        links = "".join(f"\n![{path.stem}]({os.path.relpath(path, page.parent)})\n" for path in pictures)
        put_into(page, output.stem, text + links)


def split_at_marks(page: Path, name: str) -> tuple[str, str]:
    """What stands before and behind the page's marks of that name, with them.

    Raises:
        `ValueError`: if the page has no such marks.
    """
    start, end = f"<!-- bench {name} -->", "<!-- end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no lines {start!r} and {end!r} to put the tables between.")
    return before + start, end + after


def put_into(page: Path, name: str, text: str) -> None:
    """Replaces what stands between the page's marks of that name; raises as [`split_at_marks`]."""
    before, after = split_at_marks(page, name)
    page.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")


def compare_main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="lilicorr bench compare", description="Two runs, on what both decoded.")
    parser.add_argument("first", type=Path, metavar="A.json")
    parser.add_argument("second", type=Path, metavar="B.json")
    args = parser.parse_args(argv)
    console.print(compare(read_numbers(args.first), read_numbers(args.second)).rich())
