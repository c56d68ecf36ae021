"""What tools/online_quant_fit.py says of SM90's tiles of online_quant_mm is what the library says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from blockwise_kernels import kernel
from online_quant_fit import CONFIGS, NAMES, SWEEPS, Row, Times, behind, candidates, choose, fit
from sweeps import sweep

SHAPES = list(itertools.product((1, 33, 64, 65, 96, 100, 128, 250, 512, 1000, 4100), (300, 4096, 6100, 28672)))


@pytest.fixture
def now() -> Times:
    return Times.of_configs(CONFIGS.read_text())


def problems(depths: tuple[int, ...]) -> list[Row]:
    return [{"bits": bits, "m": m, "n": n, "k": k} for bits in (8, 4) for m, n in SHAPES for k in depths]


def test_it_chooses_as_the_library_does(now: Times) -> None:
    names = set()
    for row in problems((100, 1536, 4096, 16400)):
        explained = kernel(row["m"], row["n"], row["k"], 128, row["bits"], "sm90")
        if explained.startswith("sm90"):
            names.add(choose(row, now))
            assert explained.endswith(" " + choose(row, now)), row
    assert len(names) >= 20 and any("last wave" in name for name in names)


def test_a_fit_finds_the_numbers_that_times_were_made_of(seed: int, now: Times) -> None:
    """With a constant for each problem that nothing tells it of."""
    generator = np.random.default_rng(seed)
    truth = replace(now, ns=np.round(now.ns * generator.uniform(0.7, 1.4, len(NAMES))))
    rows = problems((1536, 4096, 16400))
    for row in rows:
        constant = generator.uniform(1, 9)
        row["us"] = {c.name: constant + float(c.counts @ truth.ns) / 1000 for c in candidates(row, now)}
    assert np.abs(fit(rows, now).ns - truth.ns).max() <= 1
    assert max(behind(row, replace(truth, last_wave=0)) for row in rows) == pytest.approx(1)


def test_a_fit_of_the_sweeps_is_no_worse_than_what_serves(now: Times) -> None:
    rows = [row for path in SWEEPS for row in sweep(path) if row["m"] >= 33]
    before, after = (np.mean([behind(row, times) for row in rows]) for times in (now, fit(rows, now)))
    assert len(rows) > 400 and before < 1.006 and after < before + 0.002
