# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Gradio components that draw in the browser. Text of models and users never enters a template: it travels as data
and reaches the page through `textContent`."""

from pathlib import Path
from typing import Any

import gradio as gr

from .trace import Trace


STATIC = Path(__file__).parent / "static"


def script(*names: str) -> str:
    """Scripts as one function body: one component's own scope."""
    return "\n".join((STATIC / f"{name}.js").read_text(encoding="utf-8") for name in names)


class LatticeView(gr.HTML):
    """The text of a trace, its blocks, and the lattice of one of them to step and to play through.

    Its value is a [`Trace`], or that with what the page should know: `lattice_value(trace, ...)`.
    """

    def __init__(self, value: Any = None, **kwargs: Any):
        super().__init__(
            value,
            html_template='<div class="lattice"></div>',
            css_template=(STATIC / "lattice.css").read_text(encoding="utf-8"),
            js_on_load=script("model", "words", "export", "chart", "lattice"),
            apply_default_css=False,
            **kwargs,
        )

    def postprocess(self, value: Any) -> Any:
        return lattice_value(value) if isinstance(value, Trace) else value

    def api_info(self) -> dict[str, Any]:
        return {"type": "object", "description": "trace: a trace of lilicorr_hf; live: whether it still grows."}

    def example_value(self) -> Any:
        return None


def lattice_value(trace: Trace, live: bool = False, example: str | None = None) -> dict[str, Any]:
    """A [`LatticeView`]'s value.

    Args:
        trace ([`Trace`]): to draw.
        live (`bool`): more blocks are coming; the view follows the newest until the reader picks another.
        example (`str`): name of the recorded example, for links to it.
    """
    return {"trace": trace.to_dict(), "live": live, "example": example}


class Notice(gr.HTML):
    """One line to the reader: `None`, a status, or `{"text": ..., "error": True}`."""

    def __init__(self, value: Any = None, **kwargs: Any):
        super().__init__(
            value,
            html_template='<p class="notice" role="status"></p>',
            css_template=(STATIC / "notice.css").read_text(encoding="utf-8"),
            js_on_load=script("notice"),
            apply_default_css=False,
            **kwargs,
        )

    def api_info(self) -> dict[str, Any]:
        return {"type": "object", "description": "text, and error: true if it tells what went wrong."}


class RaceView(gr.HTML):
    """Plain and assisted decoding of one prompt on one clock, from the times measured one after the other."""

    def __init__(self, value: Any = None, **kwargs: Any):
        super().__init__(
            value,
            html_template='<div class="race"></div>',
            css_template=(STATIC / "race.css").read_text(encoding="utf-8"),
            js_on_load=script("model", "race"),
            apply_default_css=False,
            **kwargs,
        )

    def api_info(self) -> dict[str, Any]:
        return {"type": "object", "description": "lanes: name, tokens, seconds, target_passes and timed text of each."}
