"""What weight_only_mm chooses for few tokens, against what a sweep on an H200 measured of every kernel."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest

import epiloq

SWEEP = Path(__file__).parents[1] / "benchmarks/results/nvidia-h200/2026-11-22-weight-only-few-sweep.json"
SPLITS = ("", "2", "3", "4", "6")  # that were timed
# One layer's time of one token was longer than that of eight by the same kernel.
ODD = {"bits": 8, "n": 4096, "k": 4096, "m": 1}

STREAM = re.compile(r"stream (\d+) slabs of 16 weight rows, (\d+) tokens, (\d+) warps along K, stages (\d+)")
WGMMA = re.compile(r"wgmma (\d+) weight rows x (\d+) tokens, (\d+) warpgroups")


def name_in_sweep(explained: str) -> str:
    """stream slabs,warps,stages,tokens or wgmma warpgroups,blocks of 64 rows,tokens; and the blocks that share K."""
    kernel, _, split = explained.partition(", K over clusters of ")
    if found := STREAM.fullmatch(kernel):
        slabs, tokens, warps, stages = found.groups()
        name = f"stream {slabs},{warps},{stages},{tokens}"
    else:
        found = WGMMA.fullmatch(kernel)
        assert found, kernel
        rows, tokens, teams = (int(number) for number in found.groups())
        name = f"wgmma {teams},{rows // teams // 64},{tokens}"
    return f"{name} split {split}" if split else name


def measured(times: dict[str, float]) -> dict[str, float]:
    """Without the last number of a stream's name, the blocks that an SM holds, by which two of them differ."""
    found: dict[str, float] = {}
    for name, time in times.items():
        short = re.sub(r"^(stream \d+,\d+,\d+,\d+),\d+", r"\1", name)
        found[short] = min(time, found.get(short, math.inf))
    return found


def test_the_choice_is_near_the_fastest_that_was_measured() -> None:
    if not SWEEP.exists():
        pytest.skip("results of benchmarks are in the checkout only")
    behind = defaultdict(list)
    for row in json.loads(SWEEP.read_text())["sweep"]:
        problem = {key: row[key] for key in ("bits", "n", "k", "m")}
        if problem == ODD:
            continue
        times = measured(row["us"])
        chosen = name_in_sweep(epiloq.explain("weight_only_mm", **problem, group_size=128, arch="sm90"))
        if chosen.partition(" split ")[2] not in SPLITS:
            continue
        # What is not among the fastest that the file keeps is worse than all of them.
        time = times.get(chosen, max(times.values()))
        behind[problem["bits"], problem["m"]].append(time / min(times.values()))
        assert time <= 1.16 * min(times.values()), (problem, chosen)
    assert len(behind) == 11
    for case, ratios in behind.items():
        assert math.prod(ratios) ** (1 / len(ratios)) <= 1.03, (case, ratios)
