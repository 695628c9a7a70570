"""Times of parts of a block, beside what reading their weights takes."""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Part:
    """One row of the table.

    Args:
        milliseconds (`float`): of a block, the median over rounds.
        megabytes (`float`): weights the part has to read; 0 where they do not count.
        floor_milliseconds (`float`): what reading them takes at the bandwidth measured in the same run.
    """

    name: str
    milliseconds: float
    megabytes: float
    floor_milliseconds: float


class Stopwatch:
    """Seconds between stamps, by the name of what ended with each, after pending work on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.last = self.now()

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def restart(self) -> None:
        self.last = self.now()

    def stamp(self, name: str) -> None:
        now = self.now()
        self.seconds[name].append(now - self.last)
        self.last = now

    def milliseconds(self, name: str) -> float:
        """Median of all rounds but the first two, in which caches fill."""
        return 1e3 * statistics.median(self.seconds[name][2:])


def size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def read_bandwidth(device: torch.device, megabytes: int = 256) -> float:
    """Bytes a second at which a tensor far larger than most caches is summed, the best of five times."""
    data = torch.ones(megabytes * 250_000, device=device)
    watch = Stopwatch(device)
    for _ in range(5):
        watch.restart()
        data.sum()
        watch.stamp("sum")
    return 1e6 * megabytes / min(watch.seconds["sum"])


__all__ = ["Part", "Stopwatch", "read_bandwidth", "size"]
