"""The choice of one scheme for each layer within a budget, and budgets as a user gives them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from epiloq.quantize.budget import amount, knapsack


@pytest.mark.parametrize("trial", range(20))
def test_choice_is_optimal(seed: int, trial: int) -> None:
    generator = np.random.default_rng(seed + trial)
    items = int(generator.integers(1, 6))
    sizes = [generator.integers(1, 50, int(generator.integers(1, 5))).tolist() for _ in range(items)]
    losses = [generator.random(len(each)).tolist() for each in sizes]
    least, largest = sum(map(min, sizes)), sum(map(max, sizes))
    most = int(generator.integers(least, largest + 10))
    chosen = knapsack.choose(sizes, losses, most)

    def total(values: list[list[float]], options: Any) -> float:
        return sum(each[option] for each, option in zip(values, options, strict=True))

    every = itertools.product(*(range(len(each)) for each in sizes))
    best = min(total(losses, options) for options in every if total(sizes, options) <= most)
    assert total(sizes, chosen) <= most
    assert total(losses, chosen) == pytest.approx(best)
    with pytest.raises(ValueError, match=f"at least {least}"):
        knapsack.choose(sizes, losses, least - 1)


def test_a_choice_by_coarse_units_stays_within(seed: int) -> None:
    """Sizes of millions without a common divisor, in rounded units: no more than allowed, nearly all of it."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(10**6, 10**7, (60, 4)).tolist()
    losses = [sorted(generator.random(4), reverse=True) for _ in sizes]
    sizes = [sorted(each) for each in sizes]
    most = (sum(map(min, sizes)) + sum(map(max, sizes))) // 2
    chosen = knapsack.choose(sizes, losses, most)
    spent = sum(each[option] for each, option in zip(sizes, chosen, strict=True))
    assert most - 10**7 < spent <= most


@pytest.mark.parametrize(
    ("message", "count"),
    [("90MB", 90_000_000), ("1.5 GiB", 3 << 29), ("7kB", 7000), ("123456B", 123456), (".5mb", 500_000)],
)
def test_sizes_are_read(message: str, count: int) -> None:
    assert amount.parse_bytes(message) == count


@pytest.mark.parametrize("message", ["", "90", "MB", "-3MB", "90 MBit", "1e9B", "0MB", "nan", "9O MB", "1..5MB"])
def test_other_sizes_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=r"--bytes: expected a number and a unit .* as in 90MB"):
        amount.parse_bytes(message)
