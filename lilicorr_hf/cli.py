"""The `lilicorr` command. Heavy imports wait until a subcommand runs, so that `--help` answers at once."""

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console()
errors = Console(stderr=True)

Target = Annotated[str, typer.Option(help="A name `fetch-target` knows, a path or a Hub id.")]
Assistant = Annotated[str, typer.Option(help="A shipped pair's name, a path or a Hub id.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...; auto is an accelerator, if there is one.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
# Subcommands of parts of the package that build on this one.
PLUGINS = {
    "card": "Write a trained checkpoint's model card, with measured numbers.",
    "demo": "Serve the page that draws the lattice.",
    "plot": "Draw the curves of a training run.",
    "regenerate": "Write a target's own answers, which its drafter is trained on.",
    "study": "Train several systems under equal conditions, and measure them.",
    "trace": "Show how an answer was drafted, block by block.",
    "train": "Train a drafter and its head for a target.",
}


@app.callback()
def main() -> None:
    """Exact speculative decoding for Hugging Face transformers."""


@app.command("fetch-target")
def fetch_target_command(name: Annotated[str, typer.Argument(help="For instance smollm2-135m.")]) -> None:
    """Download a target model, convert it to safetensors and print its folder."""
    from .targets import fetch_target

    with complaints():
        print_plain(fetch_target(name))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask, or with --no-chat the text to continue.")],
    target: Target = "smollm2-135m",
    assistant: Assistant = "smollm2-135m",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    chat: Annotated[bool, typer.Option(help="Put the prompt through the target's chat template.")] = True,
    dtype: Annotated[str, typer.Option(help="Of both models; auto is the target's own.")] = "auto",
    device: Device = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; in each, plain and assisted take turns.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Stream an answer, then compare plain and assisted decoding of the same prompt."""
    with complaints():
        from transformers import TextStreamer

        from .measure import encode, first_divergence, run_generate
        from .pairs import load_assistant, load_target, named_device

        model, tokenizer = load_target(target, dtype=dtype, device_map=named_device(device))
        draft_model = load_assistant(assistant, model)
        inputs = encode(tokenizer, prompt, chat).to(model.device)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        options = sampling | {"max_new_tokens": max_new_tokens}

        for helper in (None, draft_model):
            run_generate(model, inputs, assistant_model=helper, **options | {"max_new_tokens": 8})
        streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        assisted, plain = [], []
        for _ in range(rounds):
            assisted.append(run_generate(model, inputs, assistant_model=draft_model, streamer=streamer, **options))
            plain.append(run_generate(model, inputs, **options))
            streamer = None

        divergence = None
        # Two samples differ by chance, so only greedy text can be compared.
        if not temperature:
            divergence = first_divergence(model, inputs["input_ids"], plain[0].token_ids, assisted[0].token_ids)
        report = {
            "text": tokenizer.decode(assisted[0].token_ids, skip_special_tokens=True),
            "tokens": len(assisted[0].token_ids),
            "plain_tokens_per_second": statistics.median(run.tokens_per_second for run in plain),
            "assisted_tokens_per_second": statistics.median(run.tokens_per_second for run in assisted),
            "speedup": statistics.median(
                a.tokens_per_second / p.tokens_per_second for a, p in zip(assisted, plain, strict=True)
            ),
            "tau": assisted[0].recording.tau,
            "plain_target_passes": plain[0].target_passes,
            "assisted_target_passes": assisted[0].target_passes,
            "identical": None if temperature else divergence is None,
            "divergence": None if divergence is None else asdict(divergence) | {"is_tie": divergence.is_tie},
        }
    if as_json:
        print_plain(json.dumps(report, indent=2))
    else:
        console.print(generate_table(report))


def generate_table(report: dict[str, Any]) -> Table:
    table = Table("", "plain", "assisted")
    table.add_row(
        "tokens/s", f"{report['plain_tokens_per_second']:.1f}", f"{report['assisted_tokens_per_second']:.1f}"
    )
    table.add_row("target passes", str(report["plain_target_passes"]), str(report["assisted_target_passes"]))
    table.add_row("tokens per pass (tau)", "1.00", f"{report['tau']:.2f}")
    table.add_row("speed-up", "", f"{report['speedup']:.2f}x")
    words = {True: "yes", False: "no", None: "not comparable (sampled)"}
    table.add_row("identical text", "", words[report["identical"]])
    if (parted := report["divergence"]) is not None:
        table.add_row("first difference", "", f"token {parted['index'] + 1}")
        table.add_row("top-2 gap there", "", f"{parted['gap']:.1e}" + " (a tie)" * parted["is_tie"])
    return table


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    help="Measure draft methods on files of prompts, or compare two runs. See `lilicorr bench --help`.",
)
def bench(context: typer.Context) -> None:
    with complaints():
        from .bench.cli import main

        main(context.args)


@app.command()
def doctor(
    target: Annotated[str, typer.Argument(help="A name `fetch-target` knows, a path or a Hub id.")] = "smollm2-135m",
    assistant: Annotated[str, typer.Argument(help="A shipped pair's name, a path or a Hub id.")] = "smollm2-135m",
    max_new_tokens: MaxNewTokens = 64,
    device: Device = "auto",
) -> None:
    """Look for what makes drafts bad without an error: layers, rotations, templates, weights, caches.

    Exits with 1 if it finds a fault.
    """
    with complaints():
        from .doctor import PROMPTS, examine, read_answers
        from .pairs import assistant_class, load_target, named_device, resolve_assistant

        folder = resolve_assistant(assistant)
        model, tokenizer = load_target(target, device_map=named_device(device))
        draft_model = assistant_class(folder).from_pretrained(folder, dtype=model.dtype, device_map=model.device)
        answers = read_answers(model, tokenizer, PROMPTS, max_new_tokens)
        faults = 0
        for finding in examine(model, tokenizer, draft_model, answers, folder):
            faults += finding.fault
            mark = "[red]fault[/red]" if finding.fault else "[green]ok[/green]   "
            console.print(f"{mark} {finding.check}: {escape(finding.words)}", highlight=False, soft_wrap=True)
    if faults:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A shipped pair's name, a folder or a Hub id; in any known format.")],
    folder: Annotated[Path, typer.Argument(help="New folder to write.")],
    to: Annotated[str, typer.Option(help="lilicorr, modelopt, sglang, vllm, dflash or transformers.")] = "lilicorr",
    head: Annotated[str, typer.Option(help="keep, drop, or init for a fresh one to train on a drafter.")] = "keep",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    stated: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of a field that the source's config.json leaves open."),
    ] = None,
) -> None:
    """Write a checkpoint in the format of another engine: tensors bit for bit, config anew."""
    with complaints():
        from .convert import FORMATS
        from .convert import convert as run_convert
        from .pairs import resolve_assistant

        fields = dict(read_assignment(text) for text in stated or [])
        written = run_convert(resolve_assistant(source), folder, to, head, revision, **fields)
        parts = "drafter and head" if written.model_class.has_head else "drafter alone"
        errors.print(f"{len(written.tensors)} tensors, {parts}, for {FORMATS[to].loads}", highlight=False)
        print_plain(folder)


def read_assignment(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` with the value in JSON, or else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes NAME=VALUE, not {text!r}.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


@app.command("fit-tree")
def fit_tree(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="JSONL of messages, turns or prompt, not trained on."),
    ],
    target: Target = "smollm2-135m",
    assistant: Assistant = "smollm2-135m",
    tree_budget: Annotated[int, typer.Option(min=1, help="Tokens of a tree.")] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts to take from each file.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    device: Device = "auto",
) -> None:
    """Find the `tree_weight` of an assistant: how much its trees should trust the drafter beside the head."""
    with complaints():
        from .bench.prompts import read_prompts
        from .doctor import read_answers
        from .modeling.modeling_lilicorr import LiLiCorrDraftModel
        from .pairs import load_target, named_device, resolve_assistant
        from .trees import tau_by_weight

        model, tokenizer = load_target(target, device_map=named_device(device))
        draft_model = LiLiCorrDraftModel.from_pretrained(
            resolve_assistant(assistant), dtype=model.dtype, device_map=model.device
        )
        draft_model.check_target(model)
        chats = [prompt.chat for file in files for prompt in read_prompts(file)[:limit]]
        answers = read_answers(model, tokenizer, chats, max_new_tokens)
        taus = tau_by_weight(model, draft_model, answers, tree_budget)
    table = Table("tree_weight", f"tau at {tree_budget} tokens")
    for weight, tau in taus.items():
        table.add_row(f"{weight:.1f}" + " (head only)" * (weight == 0) + " (DDTree)" * (weight == 1), f"{tau:.3f}")
    console.print(table)
    best = max(taus, key=taus.__getitem__)
    print_plain(f'Best: "tree_weight": {best:.1f}, for the config.json of the assistant.')


@app.command()
def profile(
    target: Target = "smollm2-135m",
    assistant: Assistant = "smollm2-135m",
    shape: Annotated[str | None, typer.Option(help="Random weights of this shape instead, such as qwen3-8b.")] = None,
    dtype: Annotated[str, typer.Option(help="Of both models.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda.")] = "cpu",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the first block.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks to time.")] = 20,
    output: Annotated[Path | None, typer.Option(help="Where to write all numbers as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw them, .svg or .png.")] = None,
) -> None:
    """Where the time of a block goes: each part of draft and verification, beside reading its weights once."""
    with complaints():
        import torch

        from .pairs import load_assistant, load_target
        from .profile import draw, random_pair
        from .profile import profile as run_profile
        from .provenance import made_with, without_folders

        if shape is None:
            model, _ = load_target(target, dtype=dtype, device_map=device)
            draft_model = load_assistant(assistant, model)
            filed = {"target": without_folders(target), "assistant": without_folders(assistant)}
        else:
            model, draft_model = random_pair(shape, device, getattr(torch, dtype))
            filed = {"target": f"{shape}, random", "assistant": f"{shape}, random"}
        result = run_profile(model, draft_model, context, rounds, filed | {"dtype": dtype} | made_with(model.device))
        if output is not None:
            output.write_text(result.to_json() + "\n", encoding="utf-8")
        if picture is not None:
            draw(result, picture)

    table = Table("part", "ms a block", "%", "MB of weights", "times their reading")
    for part in result.parts:
        table.add_row(part.name, f"{part.milliseconds:.2f}", f"{result.percent(part):.1f}", *reading(part))
    table.add_row("all", f"{result.total:.2f}", "100.0")
    console.print(table)
    choices = Table("from logits to draft, and whole drafts", "ms a block", "MB of weights", "times their reading")
    for part in [*result.choices, *result.drafts]:
        choices.add_row(part.name, f"{part.milliseconds:.2f}", *reading(part))
    console.print(choices)
    console.print(f"{context} tokens of context; memory read at {result.gigabytes_per_second:.1f} GB/s.")


def reading(part: Any) -> tuple[str, str]:
    """Megabytes of a part's weights, and how many times as long as reading them it takes; nothing without weights."""
    if not part.megabytes:
        return "", ""
    return f"{part.megabytes:.1f}", f"{part.milliseconds / part.floor_milliseconds:.1f}x"


def add_plugin(command: EntryPoint) -> None:
    """A subcommand of a part of the package that builds on this one: it reads its own options, `--help` included."""

    def run(context: typer.Context) -> None:
        with complaints():
            command.load()(context.args)

    app.command(
        command.name,
        help=PLUGINS.get(command.name, f"See `lilicorr {command.name} --help`."),
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )(run)


for entry_point in entry_points(group="lilicorr.commands"):
    add_plugin(entry_point)


def print_plain(text: object) -> None:
    """To stdout as it is; rich would wrap and colour what a script wants to read."""
    console.file.write(f"{text}\n")


@contextmanager
def complaints() -> Iterator[None]:
    """Errors that name what a user can mend end the command with that message, not with a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        errors.print(f"[red]Error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
