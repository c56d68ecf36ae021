"""When tiles of small M use split-K over a cluster, against times measured on an H200 with and without.

The bounds are what the fit of the cost model left. They tell when a changed cost no longer fits, not how good a choice
is.
"""

from __future__ import annotations

import re

import epiloq
from sweeps import measured

# What to ask `explain`.
SCHEMES = {
    "int8": {"dtype": "int8", "per_row_scales": True},
    "float8": {"dtype": "float8_e4m3fn", "per_row_scales": True},
    "groups": {"dtype": "float8_e4m3fn"},
}
TILE = re.compile(
    r"sm90 (?:per-row|group-wise) wgmma, 64 tokens x (\d+) weights, 2 warpgroups along K"
    r"(, K over clusters of 2)?"
)


def test_k_is_split_where_that_is_faster() -> None:
    behind = []
    for scheme, n, k, m, us in measured("split_k_h200"):
        kernel = epiloq.explain("groupwise_mm", **SCHEMES[scheme], m=m, n=n, k=k, arch="sm90", sm_count=132)
        chosen = TILE.fullmatch(kernel)
        assert chosen, kernel
        behind.append(us[f"{chosen[1]} split {2 if chosen[2] else 1}"] / min(us.values()) - 1)
    assert len(behind) > 150
    assert max(behind) < 0.12  # 4096 x 1024 at M = 1, where a wider tile without split-K is faster
    assert sum(behind) / len(behind) < 0.002
