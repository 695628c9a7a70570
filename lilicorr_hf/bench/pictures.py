"""Pictures of a run: acceptance length and speed-up by dataset, speed-up over batch size and over input length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .statistics import Summary
from .systems import PLAIN


TAU, SPEED = ("tau", "acceptance length"), ("speedup", "speed-up over plain decoding")
# A file's name, what is along its axis, and what it shows of that.
PICTURES = (
    ("tau", "dataset", "", *TAU),
    ("dataset", "dataset", "", *SPEED),
    ("batch", "batch", "sequences at a time", *SPEED),
    ("length", "length", "input tokens", *SPEED),
)


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
    for kind, x, xlabel, y, ylabel in PICTURES:
        if len({summary[x] for summary in whole}) < 2 and x != "dataset":
            continue
        panels = panels_of(whole, x)
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(10, 3.4 * len(panels)), squeeze=False, layout="constrained"
        )
        for axis, (title, chosen) in zip(axes.flat, panels.items(), strict=True):
            (bars if x == "dataset" else curves)(axis, chosen, x, y)
            axis.axhline(1, color="0.3", linewidth=1)
            axis.set(title=title, ylabel=ylabel, xlabel=xlabel)
            axis.grid(alpha=0.3, axis="y")
            axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        files.append(stem.with_name(f"{stem.name}-{kind}.png"))
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
        title = ", ".join(words[name](summary[name]) for name in told)
        panels.setdefault(title, []).append(summary)
    return panels


def by_system(summaries: list[Summary]) -> dict[str, list[Summary]]:
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(summary["system"], []).append(summary)
    return found


def errors(summaries: list[Summary], y: str) -> list[list[float]]:
    """Distances from a value to the ends of its confidence interval, `[2, n]`."""
    return [[s[y] - s[f"{y}_low"] for s in summaries], [s[f"{y}_high"] - s[y] for s in summaries]]


def bars(axis: Any, summaries: list[Summary], x: str, y: str) -> None:
    groups = list(dict.fromkeys(summary[x] for summary in summaries))
    systems = by_system(summaries)
    width = 0.8 / len(systems)
    for i, (system, found) in enumerate(systems.items()):
        places = [groups.index(summary[x]) + (i - (len(systems) - 1) / 2) * width for summary in found]
        heights = [summary[y] for summary in found]
        axis.bar(places, heights, width, yerr=errors(found, y), label=system, error_kw={"linewidth": 0.8})
    axis.set_xticks(range(len(groups)), groups)


def curves(axis: Any, summaries: list[Summary], x: str, y: str) -> None:
    for system, found in by_system(summaries).items():
        found = sorted(found, key=lambda summary: summary[x])
        places, heights = [summary[x] for summary in found], [summary[y] for summary in found]
        axis.errorbar(places, heights, yerr=errors(found, y), label=system, marker=".", capsize=2)
    axis.set_xscale("log", base=2)
    places = sorted({summary[x] for summary in summaries})
    axis.set_xticks(places, [str(place) for place in places])
