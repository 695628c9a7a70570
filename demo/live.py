# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Running the models behind the page: a pair loaded when first asked for, generation that streams and can be stopped.

All state of a generation lives in its generator and its worker thread, so that visitors share nothing but the weights.
"""

import platform
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from transformers import (
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lilicorr_hf.measure import encode
from lilicorr_hf.modeling.generation_lilicorr import BlockRecord, record
from lilicorr_hf.modeling.modeling_dflash import DFlashModel
from lilicorr_hf.pairs import load_assistant, load_target

from .trace import BlockTrace, Trace, decoded


WARM_UP_TOKENS = 8
THREAD_NAME = "lilicorr-generate"


@dataclass
class Pair:
    """A target with its assistant, and what to call them."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    assistant: DFlashModel
    target_name: str
    assistant_name: str

    @property
    def device(self) -> str:
        """The hardware, in words."""
        if self.target.device.type == "cuda":
            return torch.cuda.get_device_name(self.target.device)
        if self.target.device.type == "cpu":
            threads, dtype = torch.get_num_threads(), str(self.target.dtype).removeprefix("torch.")
            return f"CPU ({platform.machine()}), {threads} thread{'s' if threads > 1 else ''}, {dtype}"
        return str(self.target.device)

    def encode(self, prompt: str, max_new_tokens: int) -> BatchEncoding:
        """The chat prompt's inputs `[1, n]`.

        Raises:
            `ValueError`: if it is empty, or leaves no room for `max_new_tokens`.
        """
        if not prompt.strip():
            raise ValueError("There is no prompt yet: write one, or look at a recorded example.")
        inputs = encode(self.tokenizer, prompt, chat=self.tokenizer.chat_template is not None)
        length, limit = inputs["input_ids"].shape[1], self.target.config.get_text_config().max_position_embeddings
        if length + max_new_tokens > limit:
            raise ValueError(
                f"The prompt is too long: {length:,} tokens and {max_new_tokens} new ones exceed the {limit:,} "
                f"positions of {self.target_name}. Shorten it by {length + max_new_tokens - limit:,} tokens."
            )
        return inputs.to(self.target.device)


class Models:
    """Loads a pair when it is first asked for and keeps the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pair: Pair | None = None

    def loaded(self, target: str, assistant: str) -> bool:
        pair = self._pair
        return pair is not None and (pair.target_name, pair.assistant_name) == (target, assistant)

    def get(self, target: str, assistant: str) -> Pair:
        """Raises `ValueError` or `OSError` if there is no such pair or its parts do not fit."""
        with self._lock:
            if self._pair is None or not self.loaded(target, assistant):
                self._pair = None
                model, tokenizer = load_target(target)
                self._pair = Pair(model, tokenizer, load_assistant(assistant, model, tree_budget=0), target, assistant)
            return self._pair


@dataclass
class Progress:
    """Seconds since the call began, all new tokens so far, and the blocks verified since the last report."""

    seconds: float
    token_ids: list[int]
    blocks: list[BlockRecord] = field(default_factory=list)


class Reporter(StoppingCriteria):
    """Reports what each target pass brought, and ends the call when told to.

    `generate` asks it about every token. Plain decoding and the first token are reported there, blocks as soon as they
    are verified.

    Args:
        prompt_length (`int`): tokens before the answer.
        assisted (`bool`): whether tokens after the first come in blocks.
        reports (`SimpleQueue`), stop (`threading.Event`): to and from the reader.
    """

    def __init__(self, prompt_length: int, assisted: bool, reports: SimpleQueue, stop: threading.Event):
        self.prompt_length, self.assisted, self.reports, self.stop = prompt_length, assisted, reports, stop
        self.token_ids: list[int] = []
        self.start = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs) -> torch.Tensor:  # type: ignore[override]
        if not self.assisted or not self.token_ids:
            self.report(input_ids[0, self.prompt_length + len(self.token_ids) :].tolist())
        return torch.full((input_ids.shape[0],), self.stop.is_set(), device=input_ids.device)

    def on_block(self, block: BlockRecord) -> None:
        self.report(block.verified_ids or [], [block])

    def report(self, new_ids: list[int], blocks: Sequence[BlockRecord] = ()) -> None:
        self.token_ids += new_ids
        self.reports.put(Progress(time.perf_counter() - self.start, list(self.token_ids), list(blocks)))


def generate(pair: Pair, inputs: BatchEncoding, assisted: bool = True, **options: Any) -> Iterator[Progress]:
    """Reports of one `generate` call in a thread of its own, which ends with the iterator.

    Args:
        pair ([`Pair`]): what runs.
        inputs (`BatchEncoding`): of [`Pair.encode`].
        assisted (`bool`): with the assistant, recording lattices, or plain.
        options: for `generate`.
    """
    reports: SimpleQueue = SimpleQueue()
    stop = threading.Event()
    helper = pair.assistant if assisted else None

    def work() -> None:
        try:
            reporter = Reporter(inputs["input_ids"].shape[1], assisted, reports, stop)
            criteria = StoppingCriteriaList([reporter])
            with record(lattice=True, on_block=reporter.on_block):
                pair.target.generate(**inputs, assistant_model=helper, stopping_criteria=criteria, **options)  # type: ignore[operator]
            reports.put(None)
        except BaseException as error:  # noqa: B036 - raised again where somebody waits for it
            reports.put(error)

    worker = threading.Thread(target=work, name=THREAD_NAME, daemon=True)
    worker.start()
    try:
        while (report := reports.get()) is not None:
            if isinstance(report, BaseException):
                raise report
            yield report
    finally:
        stop.set()
        worker.join()


def sampling(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    options = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    return options | {"max_new_tokens": max_new_tokens}


def stream_trace(pair: Pair, prompt: str, temperature: float, max_new_tokens: int) -> Iterator[Trace]:
    """The trace of an assisted answer, again after every block; always the same object, grown."""
    inputs = pair.encode(prompt, max_new_tokens)
    trace = new_trace(pair, prompt, temperature)
    for progress in generate(pair, inputs, **sampling(temperature, max_new_tokens)):
        extend(trace, progress, pair.tokenizer)
        yield trace


def new_trace(pair: Pair, prompt: str, temperature: float) -> Trace:
    return Trace(
        title=f"{Path(pair.target_name).name} with {Path(pair.assistant_name).name}",
        prompt=prompt,
        target=pair.target_name,
        assistant=pair.assistant_name,
        device=pair.device,
        temperature=temperature,
        logit_scale=pair.assistant.config.logit_scale if pair.assistant.has_head else 1.0,
    )


def extend(trace: Trace, progress: Progress, tokenizer: PreTrainedTokenizerBase) -> None:
    trace.seconds = round(progress.seconds, 4)
    if not trace.blocks:
        trace.opening = decoded(tokenizer, progress.token_ids)
    for block in progress.blocks:
        trace.append(BlockTrace.from_record(block), tokenizer)


@dataclass
class Lane:
    """One runner of a race: when each piece of its text was there.

    Args:
        steps (`list` of `[seconds, text]`): one per target pass.
    """

    name: str
    steps: list[tuple[float, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, progress: Progress, tokenizer: PreTrainedTokenizerBase) -> None:
        self.token_ids = progress.token_ids
        done = "".join(text for _, text in self.steps)
        text = decoded(tokenizer, self.token_ids).rstrip("\N{REPLACEMENT CHARACTER}")
        self.steps.append((round(progress.seconds, 4), text[len(done) :]))

    def to_dict(self) -> dict[str, Any]:
        seconds = self.steps[-1][0] if self.steps else None
        return {
            "name": self.name,
            "steps": self.steps,
            "tokens": len(self.token_ids),
            "target_passes": len(self.steps),
            "seconds": seconds,
            "tokens_per_second": len(self.token_ids) / seconds if seconds else None,
        }


def race(
    pair: Pair, prompt: str, temperature: float, max_new_tokens: int
) -> Iterator[tuple[dict[str, Any], Trace | None]]:
    """Plain, then assisted, each alone on the machine and after a short warm-up; both lanes and the assisted trace."""
    inputs = pair.encode(prompt, max_new_tokens)
    lanes = {False: Lane("plain"), True: Lane("with LiLiCorr" if pair.assistant.has_head else "assisted")}
    trace = None
    for assisted in lanes:
        for _ in generate(pair, inputs, assisted, **sampling(temperature, min(WARM_UP_TOKENS, max_new_tokens))):
            pass
    for assisted, lane in lanes.items():
        trace = new_trace(pair, prompt, temperature) if assisted else None
        for progress in generate(pair, inputs, assisted, **sampling(temperature, max_new_tokens)):
            lane.add(progress, pair.tokenizer)
            if trace is not None:
                extend(trace, progress, pair.tokenizer)
            yield race_value(pair, lanes, lane.name, None), trace
    same = lanes[False].token_ids == lanes[True].token_ids
    yield race_value(pair, lanes, None, None if temperature else same), trace


def race_value(pair: Pair, lanes: dict[bool, Lane], running: str | None, identical: bool | None) -> dict[str, Any]:
    return {
        "lanes": [lane.to_dict() for lane in lanes.values()],
        "running": running,
        "identical": identical,
        "device": pair.device,
    }


def in_words(error: Exception) -> str:
    """What went wrong, for a reader who sees no traceback; anything unexpected is raised again."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return "Out of memory. Choose a shorter length or prompt, or a smaller target."
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    raise error
