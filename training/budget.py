# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Training for a number of hours instead of a number of steps."""

import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import ProgressCallback, TrainerCallback, get_scheduler
from transformers.trainer_callback import ExportableState


# A schedule is made for so many steps and read at the share of the time that has passed.
RESOLUTION = 100_000


def processor_time() -> float:
    """Seconds that this process has had of each core it computes with."""
    return time.process_time() / torch.get_num_threads()


# What `LiLiCorrTrainingArguments.clock` names.
CLOCKS = {"wall": time.perf_counter, "processor": processor_time}


class TimeBudget(TrainerCallback, ExportableState):
    """Ends a run after `hours` of training steps; evaluating and saving do not count, and resuming counts on.

    Args:
        hours (`float`).
        seconds (`float`): of training so far.
    """

    def __init__(self, hours: float, seconds: float = 0.0):
        self.hours, self.seconds = hours, seconds
        self._since = 0.0

    @property
    def progress(self) -> float:
        """Share of the time that has passed, in [0, 1]."""
        return min(1.0, self.seconds / (3600 * self.hours))

    def on_train_begin(self, args, state, control, **kwargs):
        # A checkpoint brings the seconds of its run; the hours are those asked for now.
        self.hours = args.max_hours

    def on_step_begin(self, args, state, control, **kwargs):
        self._since = CLOCKS[args.clock]()

    def on_optimizer_step(self, args, state, control, **kwargs):
        # Before anybody asks, at the end of the step, what is left.
        self.seconds += CLOCKS[args.clock]() - self._since
        if args.world_size > 1:
            # All have to end, and to change their rates, in the same step.
            seconds = broadcast(torch.tensor(self.seconds, dtype=torch.float64, device=args.device))
            self.seconds = seconds.item()

    def on_step_end(self, args, state, control, **kwargs):
        if self.progress == 1.0:
            control.should_training_stop = control.should_save = True
            control.should_evaluate |= args.eval_strategy != "no"

    def state(self) -> dict:
        return {"args": {"hours": self.hours}, "attributes": {"seconds": self.seconds}}


class TimeBar(ProgressCallback):
    """The progress bar of a run by the clock: of as many steps as there will be at the pace so far.

    Args:
        progress (`Callable`): share of the run that is over, in [0, 1].
    """

    def __init__(self, progress: Callable[[], float]):
        super().__init__()
        self.progress = progress

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if state.is_world_process_zero:
            self.training_bar.total = None
            self.training_bar.refresh()

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and self.progress() > 0:
            self.training_bar.total = round(state.global_step / self.progress())
        super().on_step_end(args, state, control, **kwargs)


def schedule_over(
    progress: Callable[[], float],
    name: str,
    optimizer: Optimizer,
    warmup_share: float,
    options: dict[str, Any] | None = None,
) -> LambdaLR:
    """The schedule that `transformers` knows as `name`, following `progress` from 0 to 1 instead of steps.

    Args:
        warmup_share (`float`): of the run.
        options (`dict`): of that schedule alone.
    """
    steps = int(warmup_share * RESOLUTION)
    by_step: Any = get_scheduler(name, optimizer, steps, RESOLUTION, scheduler_specific_kwargs=options)

    def over_progress(factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: factor(int(progress() * RESOLUTION))

    return LambdaLR(optimizer, [over_progress(factor) for factor in by_step.lr_lambdas])
