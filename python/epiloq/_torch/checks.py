"""Checks of numeric arguments; tensors are checked in C++."""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeGuard, TypeVar

import torch

T = TypeVar("T")


_MOST = 2**31 - 1  # what the C++ functions take
_LEAST = -(2**31)


def bound_arguments(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults. Raises TypeError, which names the operation, as a call does."""
    try:
        bound = inspect.signature(operation).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"epiloq.{operation.__name__}: {error}") from None
    bound.apply_defaults()
    return bound.arguments


class Arguments(SimpleNamespace):
    """The arguments of a call as attributes, with defaults."""


def explanation_of(operation: Callable[..., Any]) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Decorator of a function that explains a call, given its `Arguments`: makes it accept what `operation` does, and
    the function's own keyword arguments (``terms``)."""

    def decorate(explain: Callable[..., str]) -> Callable[..., str]:
        own = {p.name for p in inspect.signature(explain).parameters.values() if p.kind is p.KEYWORD_ONLY}

        def bound(*args: Any, **kwargs: Any) -> str:
            """`epiloq.explain` for an operation, given the arguments of a call."""
            options = {name: kwargs.pop(name) for name in own & kwargs.keys()}
            return explain(Arguments(**bound_arguments(operation, *args, **kwargs)), **options)

        return bound

    return decorate


def expect_positive(operation: str, **numbers: int) -> None:
    for argument, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)) or number < 1:
            raise ValueError(f"epiloq.{operation}: {argument}: expected a positive integer, got {number!r}")
        if isinstance(number, int) and number > _MOST:
            raise ValueError(f"epiloq.{operation}: {argument}: expected at most {_MOST}, got {number}")


def expect_int32(operation: str, **numbers: int) -> None:
    """Raise ValueError unless arguments are integers of 32 bits; the C++ functions check the range of each."""
    for argument, number in numbers.items():
        if not is_int32(number):
            wanted = f"an integer from {_LEAST} to {_MOST}"
            raise ValueError(f"epiloq.{operation}: {argument}: expected {wanted}, got {number!r}")


def is_int32(number: object) -> TypeGuard[int]:
    """Whether a value is a 32-bit integer, also NumPy's or a symbolic one.

    Asks for the type, rather than try `operator.index`: torch 2.11's compiler fails to trace the TypeError that this
    raises on a tuple."""
    if type(number) is int:
        return _LEAST <= number <= _MOST
    if isinstance(number, (bool, torch.SymInt)):
        return not isinstance(number, bool)
    return isinstance(number, numbers.Integral) and _LEAST <= int(number) <= _MOST


def expect_flags(operation: str, **flags: object) -> None:
    """Raise ValueError unless arguments are True or False, as Python's, NumPy's or 0 and 1: any other object is true,
    and what its author meant by it is not known."""
    for argument, flag in flags.items():
        if flag is not True and flag is not False and not _is_flag(flag):
            raise ValueError(f"epiloq.{operation}: {argument}: expected True or False, got {flag!r}")


def _is_flag(flag: object) -> bool:
    kinds = (bool, torch.SymBool, *([numpy.bool_] if (numpy := sys.modules.get("numpy")) else []))
    return isinstance(flag, kinds) or (isinstance(flag, numbers.Integral) and flag in (0, 1))


def as_number(operation: str, argument: str, number: float) -> float:
    """Convert a number of any type to float or int. Raises ValueError for other values."""
    if type(number) is float or isinstance(number, torch.SymFloat):
        return number
    try:
        return float(number)
    except (TypeError, ValueError, OverflowError):
        got = "an integer beyond the range of float" if isinstance(number, int) else repr(number)
        raise ValueError(f"epiloq.{operation}: {argument}: expected a number, got {got}") from None


def limits(operation: str, clamp: tuple[float, float] | None) -> tuple[float, float]:
    """Return the limits that a result is clamped to; infinite without a ``clamp``."""
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
    """Return a function that calls `run` with the arguments of `for_operator`."""

    def operator(*arguments: Any, **named: Any) -> T:
        lo, hi = arguments[at : at + 2]
        ends = (-math.inf if lo is None else lo, math.inf if hi is None else hi)
        return run(*arguments[:at], *ends, *arguments[at + 2 :], **named)

    return operator
