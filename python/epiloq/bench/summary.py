"""Geometric means over the rows of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from epiloq.bench.runner import Row


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# Name of a range -> whether it contains M. In addition every M forms a group.
RANGES: Mapping[str, Callable[[int], bool]] = {
    "M <= 64": lambda m: m <= 64,
    "M >= 1024": lambda m: m >= 1024,
    "every M": lambda m: True,
}


@dataclass(frozen=True)
class Summary:
    """Geometric means over those rows of a group that have the value."""

    operation: str
    variant: str
    arch: str
    group: str
    rows: int
    percent_of_floor: float
    peers: dict[str, float]


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """Geometric means of percent of floor and of each peer's ratio, for each M and for ranges of M."""
    done = [row for row in rows if row.percent_of_floor is not None]
    summaries = []
    for kind in dict.fromkeys((row.operation, row.variant, row.arch) for row in done):
        same = [row for row in done if (row.operation, row.variant, row.arch) == kind]
        singles = {f"M = {m}": (lambda x, m=m: x == m) for m in sorted({row.m for row in same})}
        for group, belongs in {**singles, **RANGES}.items():
            members = [row for row in same if belongs(row.m)]
            if not members:
                continue
            floor = geometric_mean([row.percent_of_floor for row in members if row.percent_of_floor is not None])
            ratios: dict[str, list[float]] = {}
            for row in members:
                for name, peer in row.peers.items():
                    if peer.ratio is not None:
                        ratios.setdefault(name, []).append(peer.ratio)
            means = {name: geometric_mean(values) for name, values in ratios.items()}
            summaries.append(Summary(*kind, group, len(members), floor, means))
    return summaries
