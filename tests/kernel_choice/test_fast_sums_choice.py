"""Which kernel FP8 products with fast accumulation take at large M, against times measured on an H200."""

from __future__ import annotations

from statistics import geometric_mean

import pytest

import epiloq
from sweeps import measured


def chosen(n: int, k: int, m: int) -> str:
    how = {"dtype": "float8_e4m3fn", "fast_accum": True, "arch": "sm90", "sm_count": 132}
    return epiloq.explain("scaled_mm", m=m, n=n, k=k, **how)


def test_the_choice_is_near_the_fastest_that_was_measured() -> None:
    """Where no tile with fast accumulation is chosen, the kernel is the one that accurate sums take."""
    behind = []
    for n, k, m, accurate_us, us in measured("fast_accum_h200"):
        kernel = chosen(n, k, m)
        assert kernel in us or "per-row" in kernel
        behind.append(us.get(kernel, accurate_us) / min(*us.values(), accurate_us))
    assert len(behind) == 35
    assert max(behind) < 1.05
    assert geometric_mean(behind) < 1.007


@pytest.mark.parametrize("m", [1, 64, 100, 128])
def test_small_m_has_accurate_sums(m: int) -> None:
    for n, k in ((2112, 7168), (28672, 4096)):
        assert chosen(n, k, m) == epiloq.explain(
            "scaled_mm", m=m, n=n, k=k, dtype="float8_e4m3fn", arch="sm90", sm_count=132
        )
