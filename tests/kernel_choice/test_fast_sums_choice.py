"""Which kernel serves float8 products with fast sums by many tokens, against times of an H200."""

from __future__ import annotations

import json
from math import exp, log
from pathlib import Path

import pytest

import epiloq

RESULTS = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200"
Shape = tuple[int, int, int]  # N, K, tokens


def chosen(n: int, k: int, m: int) -> str:
    how = {"dtype": "float8_e4m3fn", "fast_accum": True, "arch": "sm90", "sm_count": 132}
    return epiloq.explain("scaled_mm", m=m, n=n, k=k, **how)


def accurate_times() -> dict[Shape, float]:
    """Microseconds of accurate sums, from 1024 tokens on at their own clock."""
    found = {}
    for name, is_settled in (("fast-rows-by-rules", False), ("pairs-rows-settled", True)):
        for row in json.loads((RESULTS / f"2026-11-25-{name}.json").read_text())["rows"]:
            if row["variant"] == "accurate" and is_settled == (row["m"] >= 1024):
                found[row["n"], row["k"], row["m"]] = row["time_us"]
    return found


def test_what_serves_takes_hardly_longer_than_the_fastest() -> None:
    """Where no tile for fast sums serves, the tile that serves accurate ones does."""
    accurate, behind = accurate_times(), []
    for n, k, m, us in json.loads((RESULTS / "2026-11-25-fast-sums.json").read_text())["rows"]:
        kernel, known = chosen(n, k, m), accurate.get((n, k, m))
        assert kernel in us or "whole-row" in kernel
        if known is not None:
            behind.append(us.get(kernel, known) / min(*us.values(), known))
    assert len(behind) == 35
    assert max(behind) < 1.05
    assert exp(sum(map(log, behind)) / len(behind)) < 1.007


@pytest.mark.parametrize("m", [1, 64, 100, 128])
def test_few_tokens_have_accurate_sums(m: int) -> None:
    for n, k in ((2112, 7168), (28672, 4096)):
        assert chosen(n, k, m) == epiloq.explain(
            "scaled_mm", m=m, n=n, k=k, dtype="float8_e4m3fn", arch="sm90", sm_count=132
        )
