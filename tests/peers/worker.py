"""What both training workers share: turns that the parent process gives, and the stages a step's time goes to.

Runs in either environment, so it knows torch and transformers alone. A worker is one real training run of its trainer;
it waits for the parent before each step, so that of two workers only one computes at a time.
"""

import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback


STAGE = "stage: "
BACKWARD = "autograd::engine::evaluate_function: "


class Parent:
    """Lines of JSON to and from the process that started this one; whatever else is printed goes to its log."""

    def __init__(self):
        self.output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, message: dict[str, Any]) -> None:
        self.output.write(json.dumps(message) + "\n")
        self.output.flush()

    def receive(self) -> dict[str, Any]:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit("The parent process is gone.")
        return json.loads(line)


class Turns(TrainerCallback):
    """A step for each request of the parent: `{"profile": bool, "gradients": path or null}`.

    Measured from the request to the end of the optimizer step: loading and collating the row, forward, backward,
    clipping, optimizer, schedule and logging, all that the trainer does for it. The answer holds wall and CPU seconds
    and whatever the worker put into `report`; of a profiled step also the seconds of each stage.
    """

    def __init__(self, parent: Parent):
        self.parent, self.report, self.request = parent, {}, {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.answer({"ready": True})

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.request["gradients"]:
            named = {name.removeprefix("dflash_module."): p.grad for name, p in model.named_parameters()}
            save_file(
                {name: grad.float() for name, grad in named.items() if grad is not None}, self.request["gradients"]
            )

    def on_step_end(self, args, state, control, **kwargs):
        cpu, wall = time.process_time() - self.cpu, time.perf_counter() - self.wall
        timing = {"wall": wall, "cpu": cpu}
        if self.request["profile"]:
            self.root.__exit__(None, None, None)
            self.profile.stop()
            timing["stages"] = stage_seconds(self.profile.events())
        self.answer(timing | self.report)

    def answer(self, message: dict[str, Any]) -> None:
        """Ends a turn and waits for the next."""
        self.parent.send(message)
        self.request = self.parent.receive()
        if self.request["profile"]:
            self.profile = profile(activities=[ProfilerActivity.CPU])
            self.root = record_function(STAGE + "other")
            self.profile.start()
            self.root.__enter__()
        self.wall, self.cpu = time.perf_counter(), time.process_time()


def mark(owner: Any, method: str, stage: str | Callable[[], str]) -> None:
    """Makes calls of `owner.method` count as a stage, or as the one that a function names at each call."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def marked(*args, **kwargs):
        with record_function(STAGE + (stage if isinstance(stage, str) else stage())):
            return original(*args, **kwargs)

    setattr(owner, method, marked)


def output_head_stage() -> str:
    """The target runs its output head without gradients, the drafter with."""
    return "lm_head and loss" if torch.is_grad_enabled() else "target"


def stage_seconds(events) -> dict[str, float]:
    """Seconds of each stage; a backward operation belongs to the stage of the forward operation it differentiates.

    Args:
        events: of `torch.profiler.profile`; autograd gives both operations the same sequence number.
    """
    events = sorted(events, key=lambda event: event.time_range.start)
    # Operations that need no gradient carry the number of the next one that does, which is the last of them.
    forward = {event.sequence_nr: event for event in events if backward_node(event) is None}
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        node = backward_node(event)
        origin = event if node is None else forward.get(node.sequence_nr, node)
        seconds[stage_of(origin)] += event.self_cpu_time_total / 1e6
    return dict(seconds)


def ancestors(event):
    while event is not None:
        yield event
        event = event.cpu_parent


def backward_node(event):
    return next((e for e in ancestors(event) if e.name.startswith(BACKWARD)), None)


def stage_of(event) -> str:
    names = (e.name.removeprefix(STAGE) for e in ancestors(event) if e.name.startswith(STAGE))
    return next(names, "other")


def read_settings() -> dict[str, Any]:
    """The file that the parent names on the command line."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    return settings
