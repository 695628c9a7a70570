# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""A trace in a terminal: one table a block, one row a slot."""

import math
import unicodedata
from collections.abc import Iterator

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .trace import BlockTrace, Trace


MARKS = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}
STYLES = {"accepted": "green", "rejected": "red", "not reached": "dim", "text ends": "dim"}


def visible(text: str) -> str:
    """A token with everything that has no ink of its own made visible, escape codes among it."""
    if text and not text.strip(" "):
        return "␣" * len(text)
    return "".join(MARKS.get(character, escaped(character)) for character in text)


def escaped(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Zs", "Zl", "Zp")
    return f"⟨U+{ord(character):04X}⟩" if hidden else character


def outcomes(path: list[int], target: list[int]) -> list[str]:
    """How a row of token ids fares against the text: accepted, then one rejection, then never looked at."""
    words: list[str] = []
    for slot, token in enumerate(path):
        if words and words[-1] != "accepted":
            words.append("not reached")
        elif slot >= len(target):
            words.append("text ends")
        else:
            words.append("accepted" if token == target[slot] else "rejected")
    return words


def percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def walk_shares(block: BlockTrace) -> list[list[float]]:
    """Softmax over each slot's candidates given the walk before it, for the slots the walk reaches."""
    shares = []
    for slot in range(len(block.walk) if block.start_scores is not None and block.pair_scores is not None else 0):
        scores = block.pair_scores[slot - 1][block.walk[slot - 1]] if slot else block.start_scores
        weights = [math.exp(score - max(scores)) for score in scores]
        shares.append([weight / sum(weights) for weight in weights])
    return shares


def render(trace: Trace) -> Iterator[Group | Text]:
    """Renderables for a rich console: the text, then a table a block."""
    text = Text(trace.opening)
    for number, block in enumerate(trace.blocks):
        text.append(block.text, style="underline cyan" if number % 2 == 0 else "underline yellow")
    yield text
    tau = (
        f"{trace.tau:.2f} tokens per target pass" if trace.blocks else "no block: the text ended with its first token"
    )
    yield Text(f"\n{len(trace.blocks)} blocks, {tau}", style="bold")
    for number, block in enumerate(trace.blocks, start=1):
        yield Group(Text(), heading(trace, number, block), block_table(trace, block))


def heading(trace: Trace, number: int, block: BlockTrace) -> Text:
    bonus = visible(trace.tokens[block.bonus])
    line = (
        f"Block {number} after “{visible(trace.tokens[block.anchor])}”: {block.accepted} of {block.drafted} accepted"
    )
    times = ""
    if block.draft_seconds is not None and block.verify_seconds is not None:
        times = f"; draft {1000 * block.draft_seconds:.0f} ms, verify {1000 * block.verify_seconds:.0f} ms"
    return Text(f"{line}, then “{bonus}”{times}")


def block_table(trace: Trace, block: BlockTrace) -> Table:
    table = Table("slot", "drafter alone", "walk", "p → LiLiCorr", "outcome", "target", box=box.SIMPLE_HEAD)
    table.add_column("other candidates", no_wrap=True, overflow="ellipsis", style="dim")
    shares = walk_shares(block)
    for slot, word in enumerate(outcomes(block.walk_path[: block.drafted], block.target)):
        pool, chosen = block.candidates[slot], block.walk[slot]
        texts = [visible(trace.tokens[token]) for token in pool]
        table.add_row(
            str(slot + 1),
            texts[0],
            Text(texts[chosen], style="bold"),
            confidence(block, slot, chosen, shares),
            Text(word, style=STYLES[word]),
            target_cell(trace, block, slot),
            Text("  ".join(texts[:chosen] + texts[chosen + 1 :])),
        )
    return table


def confidence(block: BlockTrace, slot: int, rank: int, shares: list[list[float]]) -> str:
    """The drafter's probability of a candidate and, after the arrow, LiLiCorr's given the walk."""
    numbers = [percent(math.exp(block.log_probs[slot][rank]))] if block.log_probs is not None else []
    numbers += [percent(shares[slot][rank])] if slot < len(shares) else []
    return " → ".join(numbers)


def target_cell(trace: Trace, block: BlockTrace, slot: int) -> Text:
    if slot >= len(block.target):
        return Text()
    token = block.target[slot]
    notes = ["bonus"] if slot == block.accepted else []
    notes += [] if token in block.candidates[slot] else ["not in pool"]
    return Text(f"{visible(trace.tokens[token])}{' (' + ', '.join(notes) + ')' if notes else ''}")


__all__ = ["render", "visible"]
