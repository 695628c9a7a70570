"""Tables in the shape of the LiLiCorr paper's, as markdown and for the terminal."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich import table as rich_table

from .statistics import GROUP, TIERS, Summary
from .systems import PLAIN


DASH = "–"
BASE = "lilicorr"


@dataclass
class Table:
    """
    Args:
        title (`str`): a line above it.
        columns (list of `str`): heads; the first ones name a line.
        lines (list of lists of `str`): cells; `**` around the best of a line.
        note (`str`): what a reader has to know.
        wide (`bool`): too wide for a terminal.
    """

    title: str
    columns: list[str]
    lines: list[list[str]]
    note: str = ""
    wide: bool = False

    def markdown(self) -> str:
        rows = [self.columns, ["---"] * len(self.columns), *self.lines]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return f"**{self.title}.** {self.note}".rstrip() + f"\n\n{table}\n"

    def rich(self) -> rich_table.Table:
        table = rich_table.Table(*self.columns, title=self.title, caption=self.note or None)
        for line in self.lines:
            table.add_row(*(f"[bold]{cell.strip('*')}[/bold]" if cell.startswith("**") else cell for cell in line))
        return table


class Lines:
    """
    Summaries as lines of a table: what names a line, and the systems' numbers on it.

    Args:
        summaries (list of [`Summary`]): of one temperature.
        names (tuple of `str`): keys that tell lines apart; those that never vary are not shown, the first always.
    """

    def __init__(self, summaries: list[Summary], names: Iterable[str]):
        self.names = [
            name for i, name in enumerate(names) if i == 0 or len({summary[name] for summary in summaries}) > 1
        ]
        self.systems = list(dict.fromkeys(summary["system"] for summary in summaries))
        self.by_line: dict[tuple, dict[str, Summary]] = {}
        for summary in sorted(summaries, key=self.order):
            key = tuple(summary[name] for name in self.names)
            self.by_line.setdefault(key, {})[summary["system"]] = summary

    def order(self, summary: Summary) -> tuple:
        """By length, batch and tier; datasets and systems as they came."""
        values = {"length": summary["length"] or 0, "batch": summary["batch"]}
        values["tier"] = TIERS.index(summary["tier"]) if summary["tier"] else 0
        return tuple(value for name, value in values.items() if name in self.names)

    def heads(self) -> list[str]:
        return ["prompts" if name == "dataset" else name for name in self.names]

    def labels(self, key: tuple) -> list[str]:
        return ["all" if value is None else str(value) for value in key]

    def table(
        self, title: str, systems: list[str], cell: Callable[[Summary], str], best: str = "", note: str = ""
    ) -> Table:
        """One cell for each system, the greatest `best` of a line in bold."""
        lines = []
        for key, found in self.by_line.items():
            rivals = [found[name][best] for name in systems if best and name in found and name != PLAIN]
            cells = [self.cell(found.get(name), cell, best, max(rivals, default=None)) for name in systems]
            lines.append([*self.labels(key), *cells])
        return Table(title, [*self.heads(), *systems], lines, note)

    def cell(self, summary: Summary | None, write: Callable[[Summary], str], best: str, top: float | None) -> str:
        if summary is None:
            return DASH
        wins = top is not None and summary["system"] != PLAIN and summary[best] == top
        return f"**{write(summary)}**" if wins else write(summary)


def bounds(low: float, high: float) -> str:
    """An interval in brackets; nothing where there is none, as of one item alone."""
    return f" ({low:.2f}–{high:.2f})" if low < high else ""


def speed_cell(summary: Summary) -> str:
    if summary["system"] == PLAIN:
        return f"{summary['tokens_per_second']:.1f} tokens/s"
    return f"{summary['speedup']:.2f}x{bounds(summary['speedup_low'], summary['speedup_high'])}"


def full_cell(summary: Summary) -> str:
    rate = f"{summary['tokens_per_second']:.1f}"
    if summary["system"] == PLAIN:
        return rate
    return f"{summary['tau']:.2f} / {rate} / {summary['speedup']:.2f}x"


def seed_cell(summary: Summary) -> str:
    speed = f"{summary['speedup']:.2f}x ({summary['speedup_std']:.2f})"
    return f"{summary['tau']:.2f} ({summary['tau_std']:.2f}) / {speed}"


def tables(summaries: list[Summary], over_all: list[Summary]) -> list[Table]:
    """All tables that a run has numbers for; those of one temperature together.

    Args:
        summaries, over_all (list of [`Summary`]): of [`summarise`] and [`overall`].
    """
    found = []
    for temperature in sorted({summary["temperature"] for summary in summaries}):
        chosen = [summary for summary in summaries if summary["temperature"] == temperature]
        whole = [summary for summary in chosen if summary["category"] is None]
        regime = "greedy" if temperature == 0 else f"T={temperature:g}"
        found += temperature_tables(whole, regime)
        found.append(overall_table([s for s in over_all if s["temperature"] == temperature], regime))
        categories = [summary for summary in chosen if summary["category"] is not None]
        if categories:
            lines = Lines(categories, ("dataset", "category", "batch", "length", "tier"))
            note = "tau / tokens per second / speed-up."
            found.append(lines.table(f"By category, {regime}", lines.systems, full_cell, "tokens_per_second", note))
    return found


def temperature_tables(summaries: list[Summary], regime: str) -> list[Table]:
    lines = Lines(summaries, (name for name in GROUP if name != "temperature"))
    others = [name for name in lines.systems if name != PLAIN]
    note = "Median over prompts, 95% confidence interval of the median."
    speed = lines.table(f"Speed-up over plain decoding, {regime}", lines.systems, speed_cell, "speedup", note)
    if len(lines.by_line) > 1:
        speed.lines.append(average(lines, lines.systems))
    note = "tau, block-weighted / tokens per second / speed-up."
    found = [speed, lines.table(f"Acceptance length, {regime}", lines.systems, full_cell, "tau", note)]
    if all("tau_std" in summary for summary in summaries):
        note = f"tau and speed-up; standard deviation over {summaries[0]['seeds']} seeds."
        found.append(lines.table(f"Seeds, {regime}", others, seed_cell, "", note))
    variants = [name for name in others if name.startswith(f"{BASE}:")]
    if BASE in others and variants:
        found.append(variant_table(lines, variants, regime))
    return [*found, detail_table(lines, others, regime)]


def average(lines: Lines, systems: list[str]) -> list[str]:
    """The unweighted mean over the lines."""
    cells = []
    for system in systems:
        found = [summaries[system] for summaries in lines.by_line.values() if system in summaries]
        key, unit = ("tokens_per_second", " tokens/s") if system == PLAIN else ("speedup", "x")
        mean = sum(summary[key] for summary in found) / len(found)
        whole = len(found) == len(lines.by_line)
        cells.append(f"{mean:.{1 if system == PLAIN else 2}f}{unit}" if whole else DASH)
    return ["average", *[""] * (len(lines.names) - 1), *cells]


def overall_table(summaries: list[Summary], regime: str) -> Table:
    """Medians over the prompts of all datasets, a line for each system."""
    lines = Lines(summaries, ("batch", "length", "tier"))
    first = lines.systems[0]
    body = []
    for key, found in lines.by_line.items():
        for name, summary in found.items():
            lead = f"{summary['lead']:.2f}x{bounds(summary['lead_low'], summary['lead_high'])}"
            not_slower = f"{summary['not_slower']}/{summary['items']}"
            cells = [speed_cell(summary), not_slower, DASH if name == first else lead, f"{summary['tau']:.3f}"]
            body.append([*lines.labels(key), name, *cells])
    note = (
        "Medians over all prompts (batches, if there are several at a time) and their 95% confidence intervals; not "
        "slower: than plain decoding of the same prompt."
    )
    heads = [*lines.heads(), "system", "speed-up", "not slower", f"{first}'s speed over it", "tau"]
    return Table(f"All prompts, {regime}", heads, body, note)


def variant_table(lines: Lines, variants: list[str], regime: str) -> Table:
    """The same checkpoint decoded otherwise: tau and its change."""
    body = []
    for key, found in lines.by_line.items():
        base = found[BASE]["tau"]
        changes = [f"{found[name]['tau']:.3f} ({found[name]['tau'] / base - 1:+.1%})" for name in variants]
        body.append([*lines.labels(key), f"{base:.3f}", *changes])
    heads = [*lines.heads(), BASE, *variants]
    return Table(f"The same weights, other rules, {regime}", heads, body, "tau, block-weighted.")


def detail_table(lines: Lines, systems: list[str], regime: str) -> Table:
    """Everything else, a line for each system."""
    columns = [*lines.heads(), "system", "n", "tau (95%)", "mean tau", "tokens/pass", "coverage@K", "oracle tau"]
    columns += ["draft ms", "verify ms", "same text", "ties", "largest gap"]
    body = []
    for key, found in lines.by_line.items():
        body += [[*lines.labels(key), *detail_cells(found[name])] for name in systems if name in found]
    note = "Milliseconds are of one block of one sequence; n counts prompts, each turn of a conversation one."
    return Table(f"Details, {regime}", columns, body, note, wide=True)


def detail_cells(summary: Summary) -> list[str]:
    def cell(name: str, form: str) -> str:
        return format(summary[name], form) if name in summary else DASH

    tau = f"{summary['tau']:.3f}{bounds(summary['tau_low'], summary['tau_high'])}"
    same = f"{summary['identical']}/{summary['count']}" if "identical" in summary else DASH
    return [
        summary["system"],
        str(summary["count"]),
        tau,
        cell("tau_mean", ".3f"),
        f"{summary['tokens'] / summary['passes']:.2f}",
        cell("coverage", ".1%"),
        cell("oracle_tau", ".2f"),
        cell("draft_ms", ".1f"),
        cell("verify_ms", ".1f"),
        same,
        cell("ties", "d"),
        cell("largest_gap", ".0e"),
    ]


def exactness_note(summaries: list[Summary]) -> str:
    """How many greedy texts were the plain one, and how close the target's two best tokens were where one was not."""
    greedy = [summary for summary in summaries if summary["category"] is None and "identical" in summary]
    identical, count, ties = (sum(summary[name] for summary in greedy) for name in ("identical", "count", "ties"))
    if identical == count:
        return f"Greedy texts that are the plain one: {identical} of {count}."
    gap = max(summary["largest_gap"] for summary in greedy)
    return f"Greedy texts that are the plain one: {identical} of {count}; {ties} part at a tie, widest gap {gap:.0e}."


def session_note(provenance: dict[str, Any]) -> str:
    """What the numbers were made with, in a sentence or two."""
    last = provenance["sessions"][-1]
    made = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    commit = f", commit `{last['commit'][:12]}`" if last["commit"] else ""
    subject = provenance["subject"]
    return (
        f"Target {subject['target']} ({subject['dtype']}), assistant {subject['assistant']} "
        f"(weights {subject['weights']}), {subject['max_new_tokens']} new tokens; {last['hardware']}; {made}{commit}."
    )
