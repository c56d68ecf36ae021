"""Which tiles large M takes, and when the last wave uses split-K, against times measured on an H200.

The bounds are what the fit of the cost model left. They tell when a changed cost no longer fits, not how good a choice
is.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import geometric_mean

import pytest

import epiloq
from sweeps import measured

# What to ask `explain`, and how far behind the fastest its choices are: geometric mean and maximum.
SCHEMES = {
    "groups": ({"dtype": "float8_e4m3fn"}, 1.003, 1.05),
    "float8": ({"dtype": "float8_e4m3fn", "per_row_scales": True}, 1.003, 1.03),
    "int8": ({"dtype": "int8", "per_row_scales": True}, 1.018, 1.1),
}
TILE = re.compile(
    r"sm90 (?:per-row|group-wise) wgmma, (\d+) tokens x (\d+) weights(?:, 3 warpgroups)?"
    r"(, K over clusters of 2 in a last wave)?"
)


SMS = 132


def rest_of(m: int, n: int, tokens: int, weights: int, sm_count: int) -> int:
    """Tiles that do not fill a wave."""
    return -(-m // tokens) * -(-n // weights) % (sm_count // 2 * 2)


def times(scheme: str) -> Iterator[tuple[int, int, int, dict[tuple[int, int, bool], float]]]:
    """Tokens, n, k, and microseconds by the tokens and weights of a tile, and whether its last wave is shared: where
    that may not be, "shared" is the same kernel once more."""
    for name, n, k, m, us in measured("large_m_tiles_h200"):
        if name != scheme:
            continue
        found = defaultdict(list)
        for tile, time in us.items():
            tokens, weights = map(int, tile.removesuffix(" shared").split(" x "))
            shares = tile.endswith("shared") and 0 < rest_of(m, n, tokens, weights, SMS) <= SMS // 2
            found[tokens, weights, shares].append(time)
        yield m, n, k, {tile: sum(all_) / len(all_) for tile, all_ in found.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_wave_quantisation_is_modelled(scheme: str) -> None:
    options, mean, most = SCHEMES[scheme]
    behind = []
    for m, n, k, us in times(scheme):
        kernel = epiloq.explain("groupwise_mm", **options, m=m, n=n, k=k, arch="sm90", sm_count=SMS)
        chosen = TILE.fullmatch(kernel)
        time = chosen and us.get((int(chosen[1]), int(chosen[2]), chosen[3] is not None))
        if time:  # otherwise a small-M tile, or one that was not timed in this form
            behind.append(time / min(us.values()))
    assert len(behind) >= 25
    assert max(behind) < most
    assert geometric_mean(behind) < mean


@pytest.mark.parametrize("sm_count", [1, 2, 3, 78, 114, 131, 132])
def test_split_k_is_limited_to_half_a_wave(sm_count: int) -> None:
    """With every tile; a single SM has no other to split K with."""
    shared = 0
    sizes = itertools.product(
        (66, 129, 256, 513, 1024, 4096), (128, 2112, 4096, 6144, 17000, 28672), (256, 2048, 16384)
    )
    for (m, n, k), (options, *_) in itertools.product(sizes, SCHEMES.values()):
        kernel = epiloq.explain("groupwise_mm", **options, m=m, n=n, k=k, arch="sm90", sm_count=sm_count)
        chosen = TILE.fullmatch(kernel)
        if chosen is None or chosen[3] is None:  # a small-M tile, or no split-K
            continue
        assert 0 < rest_of(m, n, int(chosen[1]), int(chosen[2]), sm_count) <= sm_count // 2, (m, n, k, kernel)
        shared += 1
    assert (shared > 0) == (sm_count > 1)
