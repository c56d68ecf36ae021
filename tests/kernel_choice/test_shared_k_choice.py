"""Which tiles of few tokens share their K, against times of an H200 with and without.

The bounds are what the fit left: they say when a time that is changed no longer fits, not how good it is.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import epiloq

RESULTS = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200/2026-11-23-given-sums.json"
# What a scheme is to explain.
SCHEMES = {
    "int8": {"dtype": "int8", "whole_rows": True},
    "float8": {"dtype": "float8_e4m3fn", "whole_rows": True},
    "groups": {"dtype": "float8_e4m3fn"},
}
TILE = re.compile(
    r"sm90 (?:whole-row|group-wise) wgmma, 64 tokens x (\d+) weights, 2 warpgroups along K"
    r"(, K over clusters of 2)?"
)


def times() -> dict[tuple[str, int, int, int], dict[tuple[int, int], float]]:
    """By scheme, n, k and tokens: microseconds by the weights of a tile and the blocks that share K."""
    found: defaultdict[tuple[str, int, int, int], dict[tuple[int, int], float]] = defaultdict(dict)
    results = json.loads(RESULTS.read_text())
    for name, n, k, tokens, blocks, *us in [*results["short_k"]["rows"], *results["turns"]["rows"]]:
        scheme, weights = name.split(", ")
        if scheme in SCHEMES:
            found[scheme, n, k, tokens][int(weights), blocks] = us[-1]
    return found


def test_k_is_shared_where_that_is_faster() -> None:
    problems = [(problem, us) for problem, us in times().items() if {blocks for _, blocks in us} == {1, 2}]
    assert len(problems) > 150
    behind = []
    for (scheme, n, k, tokens), us in problems:
        sizes = {"m": tokens, "n": n, "k": k, "arch": "sm90", "sm_count": 132}
        kernel = epiloq.explain("groupwise_mm", **SCHEMES[scheme], **sizes)
        chosen = TILE.fullmatch(kernel)
        assert chosen, kernel
        behind.append(us[int(chosen[1]), 2 if chosen[2] else 1] / min(us.values()) - 1)
    assert max(behind) < 0.12  # 4096 x 1024 by one token, where a wider tile that shares nothing is faster
    assert sum(behind) / len(behind) < 0.002
