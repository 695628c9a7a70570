# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Where the time of a training step goes."""

import time
from collections import defaultdict

import torch


class StageClock:
    """Splits the wall time of a step among named stages, forward and backward.

    `mark` gives the time since the mark before to a stage. In the backward pass a boundary tensor's gradient is the
    mark: it is there once everything after that tensor is done.

    Args:
        device (`torch.device`): pending work there is waited for at every mark.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now

    def mark_gradient(self, tensor: torch.Tensor, stage: str) -> None:
        """Marks `stage` when the gradient of `tensor` is known."""
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.mark(stage))

    def shares(self) -> dict[str, float]:
        total = sum(self.seconds.values())
        return {name: seconds / total for name, seconds in self.seconds.items()} if total else {}
