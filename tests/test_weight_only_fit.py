"""What tools/weight_only_fit.py fits is what the library's choice is made of."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest

import epiloq
from weight_only_fit import (
    MEMORY,
    ROOT,
    SWEEPS,
    TIMES,
    Model,
    Problems,
    cost,
    fit,
    losses,
    places,
    read,
    with_numbers,
)
from weight_only_sweep import name_in_sweep

HEADER = ROOT / "src" / TIMES
pytestmark = pytest.mark.skipif(
    not HEADER.exists() or not SWEEPS[0].exists() or shutil.which("c++") is None,
    reason="needs the checkout and a compiler",
)


@pytest.fixture(scope="module")
def text() -> str:
    return HEADER.read_text()


def test_numbers_are_those_of_the_header(seed: int, text: str) -> None:
    """In its order; and others take their places, and nothing else's."""
    before = [float(found[0]) for found in places(text)]
    assert np.array_equal(Model(text).numbers(), before) and len(before) > 90
    others = np.array(before) * np.random.default_rng(seed).uniform(0.5, 30, len(before))
    changed = with_numbers(text, others.tolist())
    assert np.allclose(Model(changed).numbers(), others, rtol=5e-3)
    assert with_numbers(changed, before) == text


@pytest.mark.parametrize("memory", MEMORY.values())
def test_the_least_time_is_what_the_library_chooses(text: str, memory: int) -> None:
    model, families = Model(text), set()
    for bits, m, (n, k) in itertools.product(
        (4, 8), (1, 2, 3, 8, 9, 16), ((100, 128), (2112, 7168), (4096, 14336), (28672, 4096), (24576, 1536))
    ):
        explained = epiloq.explain(
            "weight_only_mm", m=m, n=n, k=k, bits=bits, group_size=128, arch="sm90", memory_gb_s=memory
        )
        first = len(model.times(model.numbers()))
        names = model.add(m, n, k, bits, memory)
        if not explained.startswith("wgmma"):
            families.add(explained.split()[0])
            times = model.times(model.numbers())[first:]
            assert names[int(times.argmin())] == name_in_sweep(explained), (bits, m, n, k)
    assert families == {"stream", "ring"}


def test_a_fit_of_other_numbers_comes_nearer(seed: int, text: str) -> None:
    model = Model(text)
    problems = read(model, SWEEPS[3:4])
    assert len(problems.rows) == 30 and problems.served.all()
    now = model.numbers()
    start = now * np.exp(np.random.default_rng(seed).normal(0, 0.3, len(now)))
    found = fit(model, problems, start, 12)
    before, after = (cost(losses(problems, model.times(at))) for at in (start, found))
    assert after < 0.8 * before


def test_what_serves_is_near_the_fastest_of_all_sweeps(text: str) -> None:
    model = Model(text)
    problems: Problems = read(model, SWEEPS)
    lost = losses(problems, model.times(model.numbers()))
    assert len(lost) == 446 and lost.mean() <= 0.0105 and lost.max() <= 0.1
