# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""How far to draft, and whether to draft at all, so that a drafter never makes a call slower than it is without one.

A draft of `d` tokens earns as many tokens as the target accepts, and one more, for the seconds of the draft and of a
pass over `d + 1` rows. Both sides are estimated from the call itself.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence


# Blocks to try before a verdict.
TRIAL = 3
# Passes without a draft after the first verdict against it, and at most; every verdict in a row doubles them.
FIRST_REST, LONGEST_REST = 16, 128
# What a block counts for in running sums when the next one is added.
DECAY = 0.98
# How fast the correction of what a drafter expects moves.
CORRECTION = 0.1
# Standard errors by which blocks must earn less than they cost before they are given up.
DOUBT = 0.75
# Times kept of each kind of pass; their median stands for all.
SAMPLES = 5


class Pace:
    """
    The course of one call of one sequence.

    A draft is cut where another token is expected to earn less than its rows cost at the rate of plain decoding.
    That rate is measured by a pass without a draft, after a few blocks. Drafting pauses when blocks earn less than
    that, beyond what chance explains, and is tried again after a rest. What a drafter expects is corrected by what the
    target accepts.
    """

    def __init__(self) -> None:
        self.pass_seconds: dict[int, deque[float]] = {}
        self.blocks = self.resting = 0
        self.rest = FIRST_REST
        self.tokens = self.seconds = 0.0
        self.exponent, self.expected = 1.0, 0.0

    def wants_draft(self) -> bool:
        """Whether to draft for the next pass."""
        return self.resting == 0 and (0 in self.pass_seconds or self.blocks < TRIAL)

    def length(self, survival: Sequence[float]) -> int:
        """How many of the drafted tokens to verify.

        Args:
            survival (sequence of `float`): the probability, to the drafter, that the target accepts the draft up to
                each token.
        """
        corrected = [chance**self.exponent for chance in survival]
        length = self.best_length(corrected)
        self.expected = sum(corrected[:length])
        return length

    def best_length(self, survival: Sequence[float]) -> int:
        full = len(survival)
        if 0 not in self.pass_seconds or max(self.pass_seconds) < full:
            return full
        plain = self.plain_seconds
        earned, best, length = 1.0, 0.0, 0
        for drafted, chance in enumerate(survival, start=1):
            earned += chance
            if (worth := earned - self.expected_seconds(drafted) / plain) > best:
                best, length = worth, drafted
        # A trial of nothing would teach nothing.
        return max(length, min(1, full)) if self.blocks < TRIAL else length

    @property
    def plain_seconds(self) -> float:
        return statistics.median(self.pass_seconds[0])

    def expected_seconds(self, drafted: int) -> float:
        """Of a pass that verifies `drafted` tokens: measured, or on the line between the nearest that were."""
        if drafted in self.pass_seconds:
            return statistics.median(self.pass_seconds[drafted])
        below = max(n for n in self.pass_seconds if n < drafted)
        above = min(n for n in self.pass_seconds if n > drafted)
        low, high = (statistics.median(self.pass_seconds[n]) for n in (below, above))
        return low + (high - low) * (drafted - below) / (above - below)

    def add(self, drafted: int, tokens: float, draft_seconds: float | None, pass_seconds: float) -> None:
        """Takes note of a pass.

        Args:
            drafted (`int`): tokens it verified.
            tokens (`float`): tokens it gained.
            draft_seconds (`float`): of the draft, also one that was cut to nothing; `None` where there was none.
            pass_seconds (`float`): of the target's pass.
        """
        first = not self.pass_seconds
        if drafted:
            error = (self.expected - min(tokens - 1, drafted)) / drafted
            self.exponent *= math.exp(CORRECTION * error)
        self.pass_seconds.setdefault(drafted, deque(maxlen=SAMPLES)).append(pass_seconds)
        if draft_seconds is None:
            self.resting = max(0, self.resting - 1)
            return
        if first:
            # The first draft reads the prompt, and does what is done once.
            return
        self.blocks += 1
        self.tokens = DECAY * self.tokens + tokens
        self.seconds = DECAY * self.seconds + draft_seconds + pass_seconds
        if 0 in self.pass_seconds and self.blocks >= TRIAL:
            self.judge()

    def judge(self) -> None:
        # Tokens that plain decoding writes in that time, and by how much blocks that earn as many miss them by chance,
        # sums of geometric numbers. Whoever was given up before has to show that it pays.
        needed, blocks = self.seconds / self.plain_seconds, (1 - DECAY**self.blocks) / (1 - DECAY)
        error = math.sqrt(max(needed * (needed / blocks - 1), 0.0))
        doubt = DOUBT if self.rest == FIRST_REST else 0.0
        if self.tokens < needed - doubt * error:
            self.resting, self.rest = self.rest, min(2 * self.rest, LONGEST_REST)
            self.blocks, self.tokens, self.seconds = 0, 0.0, 0.0
        elif self.blocks > 2 * TRIAL:
            self.rest = FIRST_REST


__all__ = ["Pace"]
