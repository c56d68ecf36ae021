"""What tools/kernel_times/online_quant_fit.py fits is what the library's choices are made of."""

from __future__ import annotations

import itertools
import os
import shutil

import numpy as np
import pytest

import epiloq
from online_quant_fit import (
    HEADER,
    MEMORY,
    SWEEPS,
    Bools,
    Floats,
    Model,
    Problems,
    climb,
    cost,
    fit,
    is_among,
    numbers_in,
    with_numbers,
)
from online_quant_sweep import name_of

LAYERS = ((100, 128), (576, 1536), (2112, 7168), (4096, 4096), (4096, 14336), (28672, 4096), (24576, 1536))
pytestmark = pytest.mark.skipif(
    not all(path.exists() for path in (HEADER, *SWEEPS))
    or shutil.which(os.environ.get("CXX", "c++").split()[0]) is None,
    reason="needs the checkout and a compiler",
)


def header_model() -> Model:
    return Model(HEADER.read_text())


def test_numbers_are_those_of_the_header(seed: int) -> None:
    """In its order; and others take their places, and nothing else's."""
    text = HEADER.read_text()
    before = [float(found[0]) for found in numbers_in(text)]
    assert np.array_equal(header_model().numbers(), before) and len(before) > 50
    others = np.array(before) * np.random.default_rng(seed).uniform(0.5, 30, len(before))
    changed = with_numbers(text, others.tolist())
    assert np.allclose(Model(changed).numbers(), others, rtol=5e-3)
    assert with_numbers(changed, before) == text


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORY.values())
def test_the_least_time_is_what_the_library_chooses(memory: int) -> None:
    model, families = header_model(), set()
    for bits, m, (n, k) in itertools.product((4, 8), (1, 2, 3, 8, 9, 16, 64, 100, 500, 2000), LAYERS):
        problem = {"bits": bits, "m": m, "n": n, "k": k}
        explained = epiloq.explain("online_quant_mm", **problem, group_size=128, arch="sm90", memory_gb_s=memory)
        families.add(explained.split()[0])
        first = len(model.times(model.numbers()))
        names = model.add(problem, memory)
        assert names[int(model.times(model.numbers())[first:].argmin())] == name_of(explained), problem
    assert families == {"sm80", "sm90"}


def cost_of(model: Model, problems: Problems, numbers: Floats) -> float:
    return cost(problems.losses(model.times(numbers)))


def bad_start(model: Model, problems: Problems, changed: Bools, seed: int) -> Floats:
    """Some of the header's numbers changed at random, until choices are worse: not every change makes them so."""
    now, random = model.numbers(), np.random.default_rng(seed)
    starts = (now * np.exp(random.normal(0, 0.3, len(now)) * changed) for _ in range(1000))
    return next(start for start in starts if cost_of(model, problems, start) > 0.2)


@pytest.mark.slow
def test_fit_reduces_the_loss() -> None:
    """From one bad start, always the same: of any start no more is certain than that the fit is not worse."""
    model = header_model()
    card = next(path for path in SWEEPS if "h200" in path.name)
    problems, now = Problems(model, [card]), model.numbers()
    assert len(problems.rows) >= 30
    start = bad_start(model, problems, np.ones(len(now), bool), 0)
    assert cost_of(model, problems, fit(model, problems, start, 20)) < 0.9 * cost_of(model, problems, start)


@pytest.mark.slow
def test_fit_changes_only_selected_parameters(seed: int) -> None:
    """Of some tokens, the times of WGMMA steps: no others change. A climb goes on from there, in written numbers."""
    text, model = HEADER.read_text(), header_model()
    card = next(path for path in SWEEPS if "h100.json" in path.name)
    problems, now = Problems(model, [card], range(1, 129)), model.numbers()
    assert problems.rows and all(row["m"] <= 128 for row in problems.rows)
    steps = is_among(text, "kSm90Steps")
    assert 0 < steps.sum() < len(steps) and is_among(text, "").all()
    start = now * np.exp(np.random.default_rng(seed).normal(0, 0.3, len(now)) * steps)
    found = fit(model, problems, start, 20, steps)
    assert np.array_equal(found[~steps], now[~steps]) and not np.array_equal(found[steps], start[steps])
    higher = climb(model, problems, found, 300, steps)
    assert np.array_equal(higher[~steps], now[~steps])
    assert problems.losses(model.times(higher)).mean() <= problems.losses(model.times(found)).mean()
    assert np.array_equal(Model(with_numbers(text, higher.tolist())).numbers(), higher)


def test_choices_are_near_the_fastest_of_all_sweeps() -> None:
    """The bounds are what the fits left: they say when a kernel or a number that is changed no longer fits."""
    model = header_model()
    problems, times = Problems(model, SWEEPS), model.times(model.numbers())
    lost = problems.losses(times)
    assert len(problems.rows) == 297 and lost.mean() <= 0.0045 and lost.max() <= 0.083
    assert problems.unknown(times) <= 20
