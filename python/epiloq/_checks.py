"""Checks of numbers that operations are told; tensors are checked in C++."""

from __future__ import annotations

import math

import torch


def expect_positive(operation: str, **numbers: int) -> None:
    for argument, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)) or number < 1:
            raise ValueError(f"epiloq.{operation}: {argument}: expected a positive integer, got {number!r}")


def limits(operation: str, clamp: tuple[float, float] | None) -> tuple[float, float]:
    """The ends that a result is clamped to; infinite without a ``clamp``."""
    if clamp is None:
        return -math.inf, math.inf
    try:
        lo, hi = map(float, clamp)
    except (TypeError, ValueError):
        lo = hi = math.nan
    if not lo <= hi:
        raise ValueError(f"epiloq.{operation}: clamp: expected (lo, hi) with lo <= hi, got {clamp!r}")
    return lo, hi
