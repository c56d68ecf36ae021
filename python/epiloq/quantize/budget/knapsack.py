"""Multiple-choice knapsack by dynamic programming: one option per item, minimum total loss within a total size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CELLS = 1 << 15
"""Maximum number of units in which sizes are counted; they are rounded up, so that a choice never exceeds the limit."""


def choose(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], most: int) -> list[int]:
    """Choose one option per item so that the sum of losses is minimal and the sum of sizes is at most `most`.

    Returns the options' indices.

    Exact if the range divided by the sizes' greatest common divisor is at most `CELLS` units. Otherwise the result may
    miss the optimum by one unit per item, and the remaining size is used by exchanging single options afterwards. Among
    equal losses the smaller total size is chosen. Raises ValueError if even the smallest options exceed `most`.
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
    return _improve(chosen_options[::-1], sizes, losses, most)


def _improve(
    chosen: list[int], sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], most: int
) -> list[int]:
    """Repeat the single exchange with the largest gain while one fits; rounding of sizes may have left room."""
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
