"""One option for each item, the least loss within a weight: the multiple-choice knapsack by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CELLS = 1 << 15
"""Weights are counted in so many units at most, rounded up, so that a choice never exceeds what it may."""


def choose(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], most: int) -> list[int]:
    """The number of one option of each item, with the least sum of losses for a sum of sizes of at most `most`.

    Exact where the sizes' greatest common divisor cuts the range into at most `CELLS` units; otherwise the sum of sizes
    may stay below what is best by one unit an item, and what remains is spent on single items afterwards. Of equal
    losses the smaller sum of sizes is taken. Raises ValueError where the smallest options exceed `most`.
    """
    least = [min(each) for each in sizes]
    room = min(most, sum(max(each) for each in sizes)) - sum(least)
    if room < 0:
        raise ValueError(f"knapsack: expected at least {sum(least)}, got {most}")
    extra = [[size - low for size in each] for each, low in zip(sizes, least, strict=True)]
    unit = max(math.gcd(room, *(size for each in extra for size in each)), -(-room // CELLS), 1)
    cells = room // unit
    best = np.zeros(cells + 1)
    taken: list[NDArray[np.int16]] = []
    for steps, lost in zip(extra, losses, strict=True):
        found, chosen = np.full(cells + 1, np.inf), np.zeros(cells + 1, dtype=np.int16)
        for option in sorted(range(len(steps)), key=lambda option: steps[option]):
            step = -(-steps[option] // unit)
            if step > cells:
                continue
            reached = np.full(cells + 1, np.inf)
            reached[step:] = best[: cells + 1 - step] + lost[option]
            better = reached < found
            found, chosen = np.where(better, reached, found), np.where(better, option, chosen).astype(np.int16)
        best = found
        taken.append(chosen)
    cell, chosen_options = int(np.argmin(best)), []
    for chosen, steps in zip(reversed(taken), reversed(extra), strict=True):
        option = int(chosen[cell])
        chosen_options.append(option)
        cell -= -(-steps[option] // unit)
    return _spend(chosen_options[::-1], sizes, losses, most)


def _spend(
    chosen: list[int], sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], most: int
) -> list[int]:
    """Take the single exchange that gains most for as long as one fits, which rounding may have made possible."""
    left = most - sum(each[option] for each, option in zip(sizes, chosen, strict=True))
    while True:
        gains = [
            (losses[item][chosen[item]] - losses[item][option], item, option)
            for item in range(len(chosen))
            for option in range(len(sizes[item]))
            if sizes[item][option] - sizes[item][chosen[item]] <= left
        ]
        gain, item, option = max(gains, default=(0.0, 0, 0))
        if gain <= 0:
            return chosen
        left -= sizes[item][option] - sizes[item][chosen[item]]
        chosen[item] = option
