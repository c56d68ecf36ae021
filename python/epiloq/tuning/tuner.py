"""`epiloq.tune`: times the kernels for the user's products and keeps the fastest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

from epiloq import _core
from epiloq.progress import Stage, unseen
from epiloq.tuning.problems import DEFAULT_SCHEMES, Candidates, Problem, problems_of
from epiloq.tuning.store import Card, Entry, apply, cache_path, card_of, read, save
from epiloq.tuning.timer import CudaTimer, Timer

TOKENS = (1, 16, 256, 2048)
MIN_GAIN = 0.02
"""Least fraction of the default's time that a candidate must save to replace it; less would be noise."""
MOST_EXPECTED = 3.0
"""Candidates are not timed if the cost model predicts this multiple of the best one's time."""
NO_GPU = "epiloq.tune: expected a CUDA device that epiloq has kernels for, found none"


@dataclass(frozen=True)
class Measured:
    """A problem, its default kernel and its fastest, with times in microseconds, and the number of kernels timed."""

    problem: Problem
    key: str
    default: str
    default_us: float
    kernel: str
    us: float
    timed: int

    @property
    def better(self) -> bool:
        """Whether the fastest replaces the default."""
        return self.us < (1 - MIN_GAIN) * self.default_us


@dataclass(frozen=True)
class Tuned:
    """Result of `epiloq.tune`: all problems in order, and the file with the choices (None: not saved)."""

    card: Card
    path: Path | None
    measured: list[Measured] = field(default_factory=list)


def tune(
    what: nn.Module | Iterable[Any],
    tokens: Sequence[int] = TOKENS,
    schemes: Sequence[str] = DEFAULT_SCHEMES,
    *,
    path: str | os.PathLike[str] | None = None,
    device: int | None = None,
    stage: Stage = unseen,
) -> Tuned:
    """Time all kernels for each product of `what` on this GPU; the fastest is used from then on.

    Each product is timed with cold caches. A kernel replaces the default only if it is measurably faster; all
    candidates have the same accuracy. Choices apply to M near `tokens`: exactly up to 8, then up to the next multiple
    of 8 (up to 64 tokens), of 16 (256) or of 128; multiples of 128 are separate from other M. They are saved to a file
    and used by later processes on the same GPU model with the same version of epiloq.

    Args:
        what: a model, quantised layers, shapes ``(N, K)`` = (out_features, in_features), or a list of these.
        tokens: the numbers of tokens M.
        schemes: names of the schemes for which shapes are tuned; layers have their own.
        path: the file; by default EPILOQ_TUNING, or epiloq/tuning.json in the user's cache folder.
        device: index of the CUDA device, by default the current one.
        stage: opens a progress display.

    Returns:
        The measurements, in order.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it.
        RuntimeError: there is no CUDA device.
        OSError: the file cannot be written.
    """
    problems = problems_of(what, tokens, schemes)
    check_device()
    card = card_of(torch.cuda.current_device() if device is None else device)
    return tune_problems(problems, card, CudaTimer(card.index), cache_path(path), stage)


def check_device() -> None:
    """Raise RuntimeError if there is no CUDA device, or this build has no kernels."""
    if not (_core.built_archs() and torch.cuda.is_available()):
        raise RuntimeError(NO_GPU)


def tune_problems(
    problems: Sequence[Problem], card: Card, timer: Timer, path: Path | None, stage: Stage = unseen
) -> Tuned:
    """`tune` with a given timer. Measurements made before an interruption are kept."""
    found = Tuned(card, path)
    if path is not None:
        _check_writable(path, card)
    try:
        with stage("time kernels", len(problems)) as advance:
            for problem in problems:
                if (measured := _measure(problem, card, timer)) is not None:
                    found.measured.append(measured)
                advance()
    finally:
        _keep(found)
    return found


def _check_writable(path: Path, card: Card) -> None:
    """Raise OSError if the file cannot be written, and ValueError if it is not a tuning file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"epiloq.tune: path: cannot write {path}")
    save(path, card, {})


def worth_timing(candidates: Candidates) -> list[str]:
    """Return the default and the candidates that the cost model does not rule out."""
    expected = candidates.expected_us
    most = MOST_EXPECTED * min((us for us in expected.values() if us > 0), default=0.0)
    return [name for name, us in expected.items() if us <= most or us == 0 or name == candidates.chosen]


def _measure(problem: Problem, card: Card, timer: Timer) -> Measured | None:
    """Time a problem; None if there is only one kernel."""
    try:
        candidates = problem.candidates(card.index)
    except NotImplementedError:
        return None
    names = worth_timing(candidates)
    if len(names) < 2 or candidates.chosen not in names:
        return None
    times = dict(zip(names, timer(problem, names), strict=True))
    default_us = times[candidates.chosen]
    if not isfinite(default_us):
        return None
    kernel = min(times, key=times.__getitem__)
    return Measured(problem, candidates.key, candidates.chosen, default_us, kernel, times[kernel], len(names))


def _keep(found: Tuned) -> None:
    """Use and save the better choices. If the default is best, an earlier choice is removed."""
    choices = {
        each.key: Entry(each.kernel, each.us, each.default, each.default_us) for each in found.measured if each.better
    }
    measured = {each.key for each in found.measured}
    if found.path is None:
        return apply(found.card, choices)
    save(found.path, found.card, choices, without=measured)
    apply(found.card, read(found.path, found.card))
