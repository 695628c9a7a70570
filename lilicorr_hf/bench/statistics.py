"""From rows of results to the numbers of tables: medians, acceptance lengths, and how sure they are."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from .systems import PLAIN


Row = dict[str, Any]
Summary = dict[str, Any]
RESAMPLES, CONFIDENCE = 2000, 0.95
TIERS = ("low", "mixed", "high")
# What a line of a table stands for; conditions that do not vary in a run are not shown.
GROUP = ("dataset", "temperature", "batch", "length", "tier")


def resampled(count: int) -> np.ndarray:
    """Indices `[RESAMPLES, count]` of bootstrap samples; the same ones every time."""
    return np.random.default_rng(0).integers(0, count, (RESAMPLES, count))


def interval(values: np.ndarray) -> tuple[float, float]:
    """The middle [`CONFIDENCE`] of bootstrapped values."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def by_prompt(values: Sequence[float], prompts: Sequence[Hashable]) -> np.ndarray:
    """Values in one row for each prompt, `[prompts, most]`, filled up with NaN.

    What one prompt gave with several seeds, or in several turns, is alike, so prompts are resampled and not values.
    """
    rows: dict[Hashable, list[float]] = defaultdict(list)
    for prompt, value in zip(prompts, values, strict=True):
        rows[prompt].append(value)
    most = max(map(len, rows.values()))
    return np.array([row + [np.nan] * (most - len(row)) for row in rows.values()])


def median_interval(values: Sequence[float], prompts: Sequence[Hashable]) -> tuple[float, float, float]:
    """Median and its confidence interval; `prompts` says which prompt each value is of."""
    table = by_prompt(values, prompts)
    samples = np.nanmedian(table[resampled(len(table))], axis=(1, 2))
    return (statistics.median(values), *interval(samples))


def tau_interval(
    accepted: Sequence[int], blocks: Sequence[int], prompts: Sequence[Hashable]
) -> tuple[float, float, float]:
    """Block-weighted acceptance length, bonus token included, and its confidence interval.

    Args:
        accepted, blocks (sequence of `int`): of answers.
        prompts (sequence): which prompt each answer is to.
    """
    if not sum(blocks):
        return (float("nan"),) * 3
    kept, count = (np.nansum(by_prompt(values, prompts), axis=1) for values in (accepted, blocks))
    index = resampled(len(count))
    samples = 1 + kept[index].sum(axis=1) / np.maximum(count[index].sum(axis=1), 1)
    return (1 + sum(accepted) / sum(blocks), *interval(samples))


def prompt_of(row: Row) -> tuple[str, ...]:
    """The prompt of a row, or the prompts of a batch; the same for all seeds and turns."""
    return (row["dataset"], *row["ids"])


def prompts_of(row: Row, system: str) -> list[tuple[str, ...]]:
    """The prompt of each of [`counts_of`]."""
    told_apart = len(counts_of(row["systems"][system])) == len(row["ids"])
    return [(row["dataset"], name) for name in row["ids"]] if told_apart else [prompt_of(row)]


def rate(row: Row, system: str) -> float:
    """Tokens per second."""
    return row["systems"][system]["tokens"] / row["systems"][system]["seconds"]


def speedup(row: Row, system: str) -> float:
    """Over plain decoding of the same prompts, moments apart."""
    return rate(row, system) / rate(row, PLAIN)


def with_tiers(rows: list[Row]) -> list[Row]:
    """Rows of lengthened prompts with the third they fall in by the target's entropy, among those of their length."""
    by_length: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        if row["length"] is not None:
            by_length[row["length"]].append(row["entropy"])
    bounds = {length: np.percentile(values, [100 / 3, 200 / 3]) for length, values in by_length.items()}
    return [
        row | {"tier": None if row["length"] is None else TIERS[int((row["entropy"] > bounds[row["length"]]).sum())]}
        for row in rows
    ]


def grouped(rows: list[Row], names: Iterable[str]) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(groups)


def summarise(rows: list[Row]) -> list[Summary]:
    """One summary for each dataset, condition and system, then one for each category of datasets that have several."""
    rows = with_tiers(rows)
    found = []
    for key, group in grouped(rows, GROUP).items():
        found += [summary(dict(zip(GROUP, key, strict=True)), None, group, name) for name in systems_of(group)]
    for key, group in grouped(rows, GROUP).items():
        categories = grouped(group, ["category"])
        for (category,), part in categories.items() if len(categories) > 1 and group[0]["batch"] == 1 else ():
            names = dict(zip(GROUP, key, strict=True))
            found += [summary(names, category, part, name) for name in systems_of(part)]
    return found


def overall(rows: list[Row]) -> list[Summary]:
    """One summary for each condition and system, over the prompts of all datasets.

    Besides what [`summary`] has: `items`, and at how many of them the system was `not_slower` than plain decoding;
    `lead`, the first system's speed over this one's on the same prompts, a median with `lead_low` and `lead_high`.
    """
    found = []
    for key, group in grouped(with_tiers(rows), GROUP[1:]).items():
        systems = [name for name in systems_of(group) if name != PLAIN]
        for name in systems:
            leads = [rate(row, systems[0]) / rate(row, name) for row in group]
            lead, low, high = median_interval(leads, [prompt_of(row) for row in group])
            pairs: Summary = {"items": len(group), "not_slower": sum(speedup(row, name) >= 1 for row in group)}
            pairs |= {"lead": lead, "lead_low": low, "lead_high": high}
            found.append(summary(dict(zip(GROUP[1:], key, strict=True)), None, group, name) | pairs)
    return found


def systems_of(rows: list[Row]) -> list[str]:
    """Those that took part in every row, so that medians are over the same prompts."""
    return [name for name in rows[0]["systems"] if all(name in row["systems"] for row in rows)]


def summary(names: dict[str, Any], category: str | None, rows: list[Row], system: str) -> Summary:
    """The numbers of one system on one group of prompts.

    `tau` is block-weighted, `tau_mean` the mean over prompts; `low` and `high` bound 95% of bootstrapped values;
    `tau_std` and `speedup_std` are over seeds.
    """
    runs = [row["systems"][system] for row in rows]
    answers = [counts for run in runs for counts in counts_of(run)]
    accepted, blocks = zip(*answers, strict=True)
    tau, tau_low, tau_high = tau_interval(accepted, blocks, [name for row in rows for name in prompts_of(row, system)])
    median, low, high = median_interval([speedup(row, system) for row in rows], [prompt_of(row) for row in rows])
    result = names | {
        "category": category,
        "system": system,
        "count": sum(row["batch"] for row in rows),
        "tau": tau,
        "tau_low": tau_low,
        "tau_high": tau_high,
        "tau_mean": mean([1 + kept / count for kept, count in answers if count]),
        "tokens_per_second": statistics.median(rate(row, system) for row in rows),
        "speedup": median,
        "speedup_low": low,
        "speedup_high": high,
        "tokens": sum(run["tokens"] for run in runs),
        "passes": sum(run["passes"] for run in runs),
    }
    return result | stages(runs) | pool(runs) | exactness(runs) | spread(rows, system)


def counts_of(run: dict[str, Any]) -> list[tuple[int, int]]:
    """Accepted tokens and blocks of each answer, of which a batch has several, as far as they were told apart."""
    return run.get("by_sequence") or [(run["accepted"], run["blocks"])]


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def stages(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds a block and shares of the wall clock, where they were measured."""
    if not all("draft" in run for run in runs):
        return {}
    seconds, blocks = sum(run["seconds"] for run in runs), sum(run["blocks"] for run in runs)
    found: dict[str, float] = {}
    for name in ("draft", "verify"):
        took = sum(run[name] for run in runs)
        found |= {f"{name}_ms": 1000 * took / blocks, f"{name}_share": took / seconds}
    return found


def pool(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Share of slots whose token was among the candidates, and tau of a walk that always found it."""
    if not all("slots" in run for run in runs):
        return {}
    totals = {name: sum(run[name] for run in runs) for name in ("slots", "covered", "oracle", "blocks")}
    if not totals["slots"]:
        return {}
    return {"coverage": totals["covered"] / totals["slots"], "oracle_tau": 1 + totals["oracle"] / totals["blocks"]}


def exactness(runs: list[dict[str, Any]]) -> dict[str, Any]:
    if not all("identical" in run for run in runs):
        return {}
    totals = {name: sum(run[name] for run in runs) for name in ("identical", "ties")}
    return totals | {"largest_gap": max(run["gap"] for run in runs)}


def spread(rows: list[Row], system: str) -> dict[str, Any]:
    """Standard deviations over seeds, of numbers each computed from one seed's rows."""
    seeds = list(grouped(rows, ["seed"]).values())
    if len(seeds) < 2:
        return {}

    def deviation(statistic: Callable[[list[Row]], float]) -> float:
        return statistics.stdev(statistic(part) for part in seeds)

    return {
        "seeds": len(seeds),
        "tau_std": deviation(lambda part: tau_of(part, system)),
        "speedup_std": deviation(lambda part: statistics.median(speedup(row, system) for row in part)),
    }


def tau_of(rows: list[Row], system: str) -> float:
    """Block-weighted acceptance length."""
    runs = [row["systems"][system] for row in rows]
    blocks = sum(run["blocks"] for run in runs)
    return 1 + sum(run["accepted"] for run in runs) / blocks if blocks else float("nan")


def mismatches(rows: list[Row]) -> list[str]:
    """Items and systems whose greedy text parted from the plain one beyond a tie."""
    return [
        f"{row['item']}: {name}, gap {run['gap']:.1e}"
        for row in rows
        for name, run in row["systems"].items()
        if "identical" in run and run["identical"] + run["ties"] < row["batch"]
    ]
