"""Pictures of a run: bars of speed-up by dataset, curves over batch size and over input length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .statistics import Summary
from .systems import PLAIN


def draw(summaries: list[Summary], stem: Path) -> list[Path]:
    """Writes the pictures that the summaries have numbers for.

    Args:
        summaries (list of [`Summary`]): see [`summarise`].
        stem (`Path`): what file names start with: `numbers` gives `numbers-datasets.png`.

    Returns:
        the files written.

    Raises:
        `ImportError`: if matplotlib is not there.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ImportError('Pictures need matplotlib: pip install "lilicorr_hf[bench]".') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    whole = [s for s in summaries if s["category"] is None and s["system"] != PLAIN]
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for name, xlabel in (("dataset", ""), ("batch", "sequences at a time"), ("length", "input tokens")):
        if len({summary[name] for summary in whole}) < 2 and name != "dataset":
            continue
        panels = panels_of(whole, name)
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(9, 3.4 * len(panels)), squeeze=False, layout="constrained"
        )
        for axis, (title, chosen) in zip(axes.flat, panels.items(), strict=True):
            (bars if name == "dataset" else curves)(axis, chosen, name)
            axis.axhline(1, color="0.3", linewidth=1)
            axis.set(title=title, ylabel="speed-up", xlabel=xlabel)
            axis.grid(alpha=0.3, axis="y")
            axis.legend(fontsize="small", ncols=3)
        files.append(stem.with_name(f"{stem.name}-{name}.png"))
        figure.savefig(files[-1], dpi=130)
        plt.close(figure)
    return files


def panels_of(summaries: list[Summary], x: str) -> dict[str, list[Summary]]:
    """Summaries that share everything but system and `x`, under a title that names what varies between panels."""
    names = [name for name in ("dataset", "temperature", "batch", "length", "tier") if name != x]
    told = [name for name in names if len({summary[name] for summary in summaries}) > 1]
    words: dict[str, Callable[[Any], str]] = {
        "dataset": str,
        "temperature": lambda t: f"T={t:g}",
        "batch": lambda b: f"batch {b}",
        "length": lambda n: f"{n} input tokens",
        "tier": lambda tier: f"{tier} entropy",
    }
    panels: dict[str, list[Summary]] = {}
    for summary in summaries:
        title = ", ".join(words[name](summary[name]) for name in told) or "speed-up over plain decoding"
        panels.setdefault(title, []).append(summary)
    return panels


def by_system(summaries: list[Summary]) -> dict[str, list[Summary]]:
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(summary["system"], []).append(summary)
    return found


def errors(summaries: list[Summary]) -> list[list[float]]:
    """Distances from the median to the ends of its confidence interval, `[2, n]`."""
    return [
        [s["speedup"] - s["speedup_low"] for s in summaries],
        [s["speedup_high"] - s["speedup"] for s in summaries],
    ]


def bars(axis: Any, summaries: list[Summary], x: str) -> None:
    groups = list(dict.fromkeys(summary[x] for summary in summaries))
    systems = by_system(summaries)
    width = 0.8 / len(systems)
    for i, (system, found) in enumerate(systems.items()):
        places = [groups.index(summary[x]) + (i - (len(systems) - 1) / 2) * width for summary in found]
        heights = [summary["speedup"] for summary in found]
        axis.bar(places, heights, width, yerr=errors(found), label=system, error_kw={"linewidth": 0.8})
    axis.set_xticks(range(len(groups)), groups)


def curves(axis: Any, summaries: list[Summary], x: str) -> None:
    for system, found in by_system(summaries).items():
        found = sorted(found, key=lambda summary: summary[x])
        places, heights = [summary[x] for summary in found], [summary["speedup"] for summary in found]
        axis.errorbar(places, heights, yerr=errors(found), label=system, marker=".", capsize=2)
    axis.set_xscale("log", base=2)
    places = sorted({summary[x] for summary in summaries})
    axis.set_xticks(places, [str(place) for place in places])
