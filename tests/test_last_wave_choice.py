"""Which tiles of many tokens serve, and which share the K of a last wave, against times of an H200.

The bounds are what the fit left: they say when a time that is changed no longer fits, not how good it is.
"""

from __future__ import annotations

import json
import re
from math import exp, log
from pathlib import Path

import pytest

import epiloq

RESULTS = Path(__file__).parents[1] / "benchmarks/results/nvidia-h200/2026-11-25-last-waves.json"
# What a scheme is to explain, and how far behind the fastest its choices are in the mean, and at most.
SCHEMES = {
    "groups": ({"dtype": "float8_e4m3fn"}, 1.004, 1.06),
    "float8": ({"dtype": "float8_e4m3fn", "whole_rows": True}, 1.008, 1.04),
    "int8": ({"dtype": "int8", "whole_rows": True}, 1.018, 1.1),
}
TILE = re.compile(
    r"sm90 (?:whole-row|group-wise) wgmma, (\d+) tokens x (\d+) weights(?:, 3 warpgroups)?"
    r"(, K over clusters of 2 in a last wave)?"
)


def explain(scheme: str, m: int, n: int, k: int) -> re.Match[str] | None:
    kernel = epiloq.explain("groupwise_mm", **SCHEMES[scheme][0], m=m, n=n, k=k, arch="sm90", sm_count=132)
    return TILE.fullmatch(kernel)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_waves_cost_what_they_cost(scheme: str) -> None:
    _, mean, most = SCHEMES[scheme]
    behind = []
    for name, n, k, tokens, us in json.loads(RESULTS.read_text())["turns"]["rows"]:
        chosen = explain(scheme, tokens, n, k) if name == scheme else None
        if chosen is None:  # another scheme, or a tile of few tokens
            continue
        tile = f"{chosen[1]} x {chosen[2]}"
        served = us.get(f"{tile} shared") if chosen[3] else us.get(tile, us.get(f"{tile} shared"))
        if served is not None:
            behind.append(served / min(us.values()))
    assert len(behind) >= 25
    assert max(behind) < most
    assert exp(sum(map(log, behind)) / len(behind)) < mean


def test_a_last_wave_is_shared_if_half_of_the_sms_have_no_tile_of_it() -> None:
    for waves, rest in [(0, 66), (1, 1), (2, 66), (3, 0), (3, 67)]:
        n = 128 * (132 * waves + rest)
        kernel = epiloq.explain("groupwise_mm", m=128, n=n, k=16384, arch="sm90", sm_count=132, dtype="float8_e4m3fn")
        if "128 tokens x 128 weights" in kernel:
            assert ("in a last wave" in kernel) == (0 < rest <= 66), (waves, rest, kernel)
    assert explain("groups", 256, 8192, 16384)[3] is None  # 128 tiles
    assert explain("groups", 256, 4096, 14336)[3] is not None  # 64
