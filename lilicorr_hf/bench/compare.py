"""Two runs against each other, on the prompts both decoded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .statistics import GROUP, Row, by_prompt, grouped, interval, prompt_of, resampled, speedup, with_tiers
from .systems import PLAIN
from .tables import Table


def read_numbers(path: Path) -> dict[str, Any]:
    """
    Raises:
        `ValueError`: for a file that `lilicorr bench --output` did not write.
    """
    numbers = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(numbers, dict) or not {"provenance", "rows", "summary"} <= numbers.keys():
        raise ValueError(f"{path} is not what `lilicorr bench --output` writes.")
    return numbers


def compare(first: dict[str, Any], second: dict[str, Any]) -> Table:
    """tau and speed-up of both runs, and the change with its 95% confidence interval, by resampling prompts.

    Raises:
        `ValueError`: if they have no prompt and system in common.
    """
    ours, theirs = (
        {(row["item"], row["turn"]): row for row in with_tiers(numbers["rows"])} for numbers in (first, second)
    )
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
    names = [name for name in GROUP if name == "dataset" or len({a[name] for a, _ in pairs}) > 1]
    lines = []
    for key, rows in grouped([a | {"other": b} for a, b in pairs], names).items():
        systems = [s for s in rows[0]["systems"] if s != PLAIN and all(has(row, s) for row in rows)]
        lines += [line(key, system, rows) for system in systems]
    if not lines:
        raise ValueError("The two runs have no prompt under the same conditions and system in common.")
    heads = ["prompts", *names[1:], "system", "n", "tau A", "tau B", "change", "speed-up A", "speed-up B", "change"]
    note = "95% confidence interval over the prompts both decoded; * where it leaves out zero."
    return Table("B against A", heads, lines, note)


def has(row: Row, system: str) -> bool:
    return system in row["systems"] and system in row["other"]["systems"]


def line(key: tuple, system: str, rows: list[Row]) -> list[str]:
    names = [f"{value:g}" if isinstance(value, float) else "all" if value is None else str(value) for value in key]
    runs = [[row["systems"][system] for row in part] for part in (rows, [row["other"] for row in rows])]
    prompts = [prompt_of(row) for row in rows]
    counts = [
        np.stack([by_prompt([run[x] for run in part], prompts) for x in ("accepted", "blocks")]) for part in runs
    ]
    speeds = [
        by_prompt([speedup(row, system) for row in part], prompts) for part in (rows, [r["other"] for r in rows])
    ]
    return [*names, system, str(len(rows)), *change(counts, tau, ".3f"), *change(speeds, median, ".2f")]


def tau(counts: np.ndarray) -> np.ndarray:
    """Of accepted tokens and blocks `[2, *, prompts, answers]`."""
    accepted, blocks = np.nansum(counts, axis=(-2, -1))
    return 1 + accepted / np.maximum(blocks, 1)


def median(values: np.ndarray) -> np.ndarray:
    return np.nanmedian(values, axis=(-2, -1))


def change(parts: list[np.ndarray], statistic: Callable[[np.ndarray], np.ndarray], form: str) -> list[str]:
    """Both values and the relative change; the same prompts are drawn for both."""
    index = resampled(parts[0].shape[-2])
    a, b = (statistic(part) for part in parts)
    samples = [statistic(part[..., index, :]) for part in parts]
    low, high = interval(samples[1] / samples[0] - 1)
    mark = "" if low <= 0 <= high else " *"
    return [format(a, form), format(b, form), f"{b / a - 1:+.1%} ({low:+.1%} to {high:+.1%}){mark}"]
