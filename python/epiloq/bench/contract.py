"""Interface between the registered operations and the benchmark runner."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epiloq.bench.cases import Case

Inputs = Mapping[str, torch.Tensor]
Call = Callable[[], object]


class Unavailable(Exception):
    """A contender cannot run on this machine, or cannot run this case; the report prints the message as the reason."""


@dataclass(frozen=True)
class Bound:
    """A contender with its inputs prepared: one call per input set; ``note`` says what was changed to make it run."""

    calls: Sequence[Call]
    note: str = ""


Binder = Callable[[Case, Sequence[Inputs]], Bound]


def each(call: Callable[[Case, Inputs], Call]) -> Binder:
    """A contender, given its call for one input set."""
    return lambda case, sets: Bound([call(case, inputs) for inputs in sets])


def product_work(case: Case) -> int:
    """Multiplications and additions of a matrix product, 2 M N K."""
    return 2 * case.m * case.n * case.k


def note_of(error: float) -> str:
    """Note for a peer whose error is this multiple of the tolerance; such a peer is timed all the same."""
    return "" if error <= 1 else f"{error:.3g} times the tolerance off"


@dataclass(frozen=True)
class Operation:
    """Everything that the runner needs to know about an operation.

    ``inputs`` draws one input set on the generator's device. ``bind`` and ``peers`` prepare the calls of epiloq and of
    other libraries; conversions belong there, since they are not timed. ``error`` compares the first call's result with
    a float64 reference on a random subset of elements and returns a multiple of the tolerance: at most 1 is correct,
    NaN is wrong. ``work`` counts multiplications and additions; ``ceiling`` names the rate of
    :mod:`epiloq.bench.floor` that bounds them, and is empty for an operation that only moves memory.
    """

    name: str
    variants: tuple[str, ...]
    inputs: Callable[[Case, torch.Generator], Inputs]
    bind: Binder
    error: Callable[[Case, Inputs, Any, torch.Generator], float]
    ceiling: str
    peers: Mapping[str, Binder]
    has_weight: bool = True
    work: Callable[[Case], int] = product_work


def require(module: str) -> Any:
    """Import a peer, or raise Unavailable; broken extensions raise OSError or RuntimeError instead of ImportError."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Unavailable(f"import {module}: {error}") from error


def sample(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return the first, the last and up to ``count`` random indices below ``size``."""
    device = generator.device
    ends = torch.tensor([0, size - 1], device=device)
    return torch.cat([ends, torch.randint(size, (count,), generator=generator, device=device)])


def worst(error: torch.Tensor, tolerance: torch.Tensor) -> float:
    """Return the largest error as a multiple of its tolerance; NaN and infinity in either propagate."""
    return float((error / tolerance).max())
