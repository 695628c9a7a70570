# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""`lilicorr demo` and `lilicorr trace`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console


if TYPE_CHECKING:
    from .trace import Trace


def add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="smollm2-135m", help="A name `fetch-target` knows, a path or a Hub id.")
    parser.add_argument("--assistant", default="smollm2-135m", help="A shipped pair's name, a path or a Hub id.")


def demo(argv: list[str] | None = None) -> None:
    """Serves the page until interrupted."""
    parser = argparse.ArgumentParser(prog="lilicorr demo", description="Serve the page that draws the lattice.")
    add_pair(parser)
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for the whole network.")
    parser.add_argument("--port", type=int, help="Port to listen on; by default the first free one from 7860.")
    parser.add_argument("--open", action="store_true", help="Open it in a browser.")
    args = parser.parse_args(argv)
    try:
        from .page import LOOK, build
    except ModuleNotFoundError as error:
        raise OSError(f'The page needs {error.name}: pip install "lilicorr_hf[demo]".') from error
    build(args.target, args.assistant).launch(
        server_name=args.host, server_port=args.port, inbrowser=args.open, **LOOK
    )


def trace(argv: list[str] | None = None) -> None:
    """Prints, and on request saves, the trace of one assisted answer."""
    parser = argparse.ArgumentParser(prog="lilicorr trace", description="Show how an answer was drafted, by block.")
    parser.add_argument("prompt", help="What to ask; or a trace to read, a file that ends in .json.")
    add_pair(parser)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily.")
    parser.add_argument("--title", help="Of the trace.")
    parser.add_argument("--note", default="", help="Where it comes from, for those it is sent to.")
    parser.add_argument("--output", type=Path, help="Where to save the trace as JSON; `lilicorr demo` loads it.")
    args = parser.parse_args(argv)

    from .terminal import render
    from .trace import Trace

    if args.prompt.endswith(".json"):
        answer = Trace.load(args.prompt)
    else:
        answer = answer_trace(args)
    console = Console()
    for part in render(answer):
        console.print(part)
    if args.output is not None:
        answer.save(args.output)


def answer_trace(args: argparse.Namespace) -> "Trace":
    from .live import Models, stream_trace

    pair = Models().get(args.target, args.assistant)
    *_, answer = stream_trace(pair, args.prompt, args.temperature, args.max_new_tokens)
    answer.title, answer.note = args.title or answer.title, args.note
    return answer
