"""The contract between an operation's row and the runner."""

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
    """A contender cannot run here, or cannot run this case; the message is the reason that the report gives."""


@dataclass(frozen=True)
class Bound:
    """A contender with its inputs in place: one call for each input set, and what was changed to make it run."""

    calls: Sequence[Call]
    note: str = ""


Binder = Callable[[Case, Sequence[Inputs]], Bound]


def product_work(case: Case) -> int:
    """The multiplications and additions of a matrix product."""
    return 2 * case.m * case.n * case.k


def note_of(error: float) -> str:
    """What is noted of a peer whose result is so many times the tolerance off: it is timed all the same."""
    return "" if error <= 1 else f"{error:.3g} times the tolerance off"


@dataclass(frozen=True)
class Operation:
    """Everything that the runner needs to know about an operation.

    ``inputs`` draws one input set on the generator's device. ``bind`` and ``peers`` prepare epiloq's call and the
    others': conversions belong there, outside what is timed. ``error`` compares the first call's result with a float64
    reference on a random subset of elements, as a multiple of the tolerance: at most 1 is right, NaN is wrong.
    ``work`` counts multiplications and additions; ``ceiling`` names the rate of :mod:`epiloq.bench.floor` that bounds
    them, empty for an operation that only moves memory.
    """

    name: str
    variants: tuple[str, ...]
    has_weight: bool
    inputs: Callable[[Case, torch.Generator], Inputs]
    bind: Binder
    error: Callable[[Case, Inputs, Any, torch.Generator], float]
    work: Callable[[Case], int]
    ceiling: str
    peers: Mapping[str, Binder]


def require(module: str) -> Any:
    """Import a peer. A broken extension raises OSError or RuntimeError instead of ImportError: each one is a reason."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Unavailable(f"import {module}: {error}") from error


def sample(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """The first, the last and up to ``count`` random indices below ``size``."""
    device = generator.device
    ends = torch.tensor([0, size - 1], device=device)
    return torch.cat([ends, torch.randint(size, (count,), generator=generator, device=device)])


def worst(error: torch.Tensor, tolerance: torch.Tensor) -> float:
    """The largest error as a multiple of its tolerance; NaN and infinity in either come out as NaN or infinity."""
    return float((error / tolerance).max())
