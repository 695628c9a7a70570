# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The page: recorded examples at once, live generation when asked for."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from lilicorr_hf.pairs import PAIRS

from .lattice_view import STATIC, LatticeView, Notice, RaceView, lattice_value
from .trace import Trace


EXAMPLES = Path(__file__).parent / "examples"
EXAMPLE_NAMES = {"figure1": "The paper's Figure 1", "smollm2": "SmolLM2, recorded"}
MASTHEAD = """<div class="masthead"><h1>The lattice, made visible</h1>
<p>A small drafter guesses a whole block of tokens in one pass, each slot on its own. LiLiCorr scores every pair of
neighbouring guesses and walks along those that fit together. The model then checks the block in a single pass and
keeps what it would have written itself.</p></div>"""

THEME = gr.themes.Base(
    primary_hue="teal",
    neutral_hue="stone",
    radius_size="md",
    font=["ui-sans-serif", "system-ui", "sans-serif"],
    font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"],
).set(
    body_text_color="#23211e",
    body_text_color_dark="#ecebe7",
    body_text_color_subdued="#69655d",
    body_text_color_subdued_dark="#a6a29a",
    body_background_fill="#fbfaf7",
    body_background_fill_dark="#161615",
    background_fill_primary="#fbfaf7",
    background_fill_primary_dark="#161615",
    block_background_fill="transparent",
    block_background_fill_dark="transparent",
    block_border_width="0px",
    block_padding="0px",
    block_label_background_fill="transparent",
    input_background_fill="#ffffff",
    input_background_fill_dark="#1e1e1c",
    input_border_width="1px",
    button_secondary_background_fill="transparent",
    button_secondary_background_fill_dark="transparent",
    button_secondary_border_color="*border_color_primary",
    button_border_width="1px",
    checkbox_label_background_fill="transparent",
    checkbox_label_background_fill_dark="transparent",
    button_primary_background_fill="#0f766e",
    button_primary_background_fill_hover="#0b5f59",
    button_primary_background_fill_dark="#0f766e",
    button_primary_background_fill_hover_dark="#12877e",
    button_primary_text_color="#ffffff",
    button_primary_text_color_dark="#ffffff",
)
# Not part of `Blocks` since gradio 6: goes to `launch`.
LOOK: dict[str, Any] = {"theme": THEME, "css_paths": [STATIC / "page.css"], "footer_links": ["api", "settings"]}


def example_value(name: str) -> dict[str, Any]:
    return lattice_value(Trace.load(EXAMPLES / f"{name}.json"), example=name)


def open_example(request: gr.Request) -> Any:
    """The example a link names, if it names one."""
    name = request.query_params.get("example")
    return (name, example_value(name)) if name in EXAMPLE_NAMES else (gr.skip(), gr.skip())


def tell(text: str, error: bool = False) -> dict[str, Any]:
    return {"text": text, "error": error}


def load_file(path: str) -> tuple[dict[str, Any], Any]:
    try:
        trace = Trace.load(path)
    except ValueError as error:
        return tell(str(error), error=True), gr.skip()
    return tell(f"Loaded {Path(path).name}."), lattice_value(trace)


class Handlers:
    """What runs a model. Heavy imports wait until one is asked for, so that the page is there at once."""

    def __init__(self) -> None:
        self._models: Any = None

    @property
    def models(self) -> Any:
        if self._models is None:
            from .live import Models

            self._models = Models()
        return self._models

    def generate(
        self, prompt: str, target: str, assistant: str, temperature: float, max_new_tokens: float
    ) -> Iterator[tuple[Any, Any]]:
        from .live import in_words, stream_trace

        try:
            yield tell(self.loading(target, assistant)), gr.skip()
            pair = self.models.get(target, assistant)
            trace = None
            for trace in stream_trace(pair, prompt, temperature, int(max_new_tokens)):
                yield tell("Writing…"), lattice_value(trace, live=True)
            if trace is not None:
                yield tell(f"Done in {trace.seconds:.1f} s."), lattice_value(trace)
        except Exception as error:
            yield tell(in_words(error), error=True), gr.skip()

    def race(
        self, prompt: str, target: str, assistant: str, temperature: float, max_new_tokens: float
    ) -> Iterator[tuple[Any, Any, Any]]:
        from .live import in_words, race

        try:
            yield tell(self.loading(target, assistant)), None, gr.skip()
            pair = self.models.get(target, assistant)
            for lanes, trace in race(pair, prompt, temperature, int(max_new_tokens)):
                running = lanes["running"]
                text = f"Racing: {running}…" if running else "Both have finished."
                yield tell(text), lanes, lattice_value(trace, live=bool(running)) if trace else gr.skip()
        except Exception as error:
            yield tell(in_words(error), error=True), gr.skip(), gr.skip()

    def loading(self, target: str, assistant: str) -> str:
        return "Reading the prompt…" if self.models.loaded(target, assistant) else f"Loading {target}, once…"


def build(target: str = PAIRS[0], assistant: str = PAIRS[0]) -> gr.Blocks:
    """The page, to be launched with `**LOOK`; nothing is loaded until somebody generates.

    Args:
        target, assistant (`str`): preselected pair: a shipped name, a path or a Hub id.
    """
    handlers = Handlers()
    # A visitor of a public Space may not make it download whatever they name.
    local = "SPACE_ID" not in os.environ
    with gr.Blocks(title="LiLiCorr: the lattice made visible", analytics_enabled=False) as page:
        gr.HTML(MASTHEAD, apply_default_css=False)
        with gr.Row(elem_id="ask"):
            prompt = gr.Textbox(label="Ask the model", placeholder="Why is the sky blue?", scale=6, min_width=240)
            start = gr.Button("Generate", variant="primary", scale=0, min_width=110)
            start_race = gr.Button("Race", scale=0, min_width=90)
            stop = gr.Button("Stop", scale=0, min_width=90)
        with gr.Row(elem_id="shelf"):
            choices = [(title, name) for name, title in EXAMPLE_NAMES.items()]
            example = gr.Radio(choices, value="figure1", label="Or look at a recorded one", scale=4)
            upload = gr.UploadButton("Load a trace", file_types=[".json"], size="sm", scale=0, min_width=130)
        with gr.Accordion("Models and settings", open=False):
            with gr.Row():
                targets = gr.Dropdown(sorted({target, *PAIRS}), value=target, label="Target", allow_custom_value=local)
                assistants = gr.Dropdown(
                    sorted({assistant, *PAIRS}), value=assistant, label="Assistant", allow_custom_value=local
                )
                temperature = gr.Slider(0, 1.5, value=0, step=0.1, label="Temperature (0: greedy)")
                max_new_tokens = gr.Slider(8, 256, value=64, step=8, label="Length in tokens")
        notice = Notice(elem_id="notice")
        lanes = RaceView(elem_id="race")
        lattice = LatticeView(example_value("figure1"), elem_id="lattice")

        settings = [prompt, targets, assistants, temperature, max_new_tokens]
        # One model, one generation at a time: the next visitor sees a place in the queue where the notice is.
        queued: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "show_progress_on": notice}
        running: list[Any] = [
            start.click(handlers.generate, settings, [notice, lattice], api_name="generate", **queued),
            prompt.submit(handlers.generate, settings, [notice, lattice], api_visibility="private", **queued),
            start_race.click(handlers.race, settings, [notice, lanes, lattice], api_name="race", **queued),
        ]
        stop.click(lambda: tell("Stopped."), None, notice, cancels=running, queue=False, api_visibility="private")
        example.input(example_value, example, lattice, api_name="example", queue=False, show_progress="hidden")
        upload.upload(load_file, upload, [notice, lattice], api_name="load", queue=False, show_progress="hidden")
        # What is shown then is no example any more, and each can be chosen again.
        gr.on(
            [start.click, prompt.submit, start_race.click, upload.upload],
            lambda: None,
            None,
            example,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        page.load(
            open_example, None, [example, lattice], api_visibility="private", queue=False, show_progress="hidden"
        )
    return page
