"""Checks of numeric arguments; tensors are checked in C++."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


_MOST = 2**31 - 1  # what the C++ functions take


def expect_positive(operation: str, **numbers: int) -> None:
    for argument, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)) or number < 1:
            raise ValueError(f"epiloq.{operation}: {argument}: expected a positive integer, got {number!r}")
        if isinstance(number, int) and number > _MOST:
            raise ValueError(f"epiloq.{operation}: {argument}: expected at most {_MOST}, got {number}")


def limits(operation: str, clamp: tuple[float, float] | None) -> tuple[float, float]:
    """The limits that a result is clamped to; infinite without a ``clamp``."""
    if clamp is None:
        return -math.inf, math.inf
    try:
        lo, hi = map(float, clamp)
    except (TypeError, ValueError, OverflowError):
        lo = hi = math.nan
    if not lo <= hi:
        raise ValueError(f"epiloq.{operation}: clamp: expected (lo, hi) with lo <= hi, got {clamp!r}")
    return lo, hi


def for_operator(arguments: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """An operator's arguments, the ends of `limits` from place `at` on as its schema has them: None for infinite ones,
    which exported programs and packages of AOTInductor cannot hold."""
    lo, hi = arguments[at : at + 2]
    ends = (None if lo == -math.inf else lo, None if hi == math.inf else hi)
    return (*arguments[:at], *ends, *arguments[at + 2 :])


def as_operator(run: Callable[..., T], at: int) -> Callable[..., T]:
    """`run`, called with arguments as `for_operator` gives them."""

    def operator(*arguments: Any, **named: Any) -> T:
        lo, hi = arguments[at : at + 2]
        ends = (-math.inf if lo is None else lo, math.inf if hi is None else hi)
        return run(*arguments[:at], *ends, *arguments[at + 2 :], **named)

    return operator
