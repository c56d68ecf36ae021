"""Fits the times of online_quant_mm's tiles on SM90 to sweeps, and says how far behind the fastest their choices are.

    python tools/online_quant_fit.py [benchmarks/results/nvidia-h200/2026-11-26-online-quant-few-sweep.json ...]

A file's "sweep" has rows {"bits", "n", "k", "m", "us": {tile as explain calls it: microseconds}}. What select.cpp says
a tile takes is a sum of numbers of src/ops/online_quant_mm/configs.h, each so many times: `Candidate.counts` are those
times, and tests/test_online_quant_fit.py holds them to explain. So a fit is least squares on lines; a problem's own
constant (the pass that quantises, the launch) falls out, as only what its tiles differ by counts. Slower tiles count
less, as they are not chosen.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "src/ops/online_quant_mm/configs.h"
RESULTS = ROOT / "benchmarks/results"
SWEEPS = [RESULTS / f"nvidia-{card}/2026-11-26-online-quant-few-sweep.json" for card in ("h200", "h100")]
ROWS, GROUP, SMS = 128, 128, 132
TOKENS = (64, 80, 96, 112, 128)
# Clusters of so many blocks that the SMs of an H200 hold at once (src/core/target.h).
CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)
NAMES = [f"{bits} bits, {tokens} tokens" for bits in (8, 4) for tokens in TOKENS]
NAMES += ["kSm90TokenNs", "kSm90SentTokenNs", "kSm90SplitNs"]

Row = dict[str, Any]


class Candidate(NamedTuple):
    name: str  # as explain ends
    counts: np.ndarray  # of each of NAMES
    margin: int  # ns that it should save, which is no part of what it takes


@dataclass
class Times:
    """Nanoseconds, as configs.h has them."""

    ns: np.ndarray  # of each of NAMES
    last_wave: int
    most_waves: int

    @staticmethod
    def of_configs(text: str) -> Times:
        steps = [int(ns) for ns in re.findall(r"BlockwiseSm90Config\{\d+, (\d+)\}", text)]
        named = {name: int(value) for name, value in re.findall(r"(kSm90\w+) = (\d+)", text)}
        return Times(
            np.array([*steps, *(named[name] for name in NAMES[-3:])], float),
            named["kSm90LastWaveNs"],
            named["kSm90MostWaves"],
        )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def counts_of(bits: int, tokens: int, steps: int, split: int) -> np.ndarray:
    """Of a tile whose K so many blocks share."""
    counts = np.zeros(len(NAMES))
    counts[(bits == 4) * len(TOKENS) + TOKENS.index(tokens)] = ceil_div(steps, split)
    counts[-3:] = (tokens, tokens, split - 1) if split > 1 else (tokens, 0, 0)
    return counts


def candidates(row: Row, times: Times) -> Iterator[Candidate]:
    """In the order in which select.cpp considers them."""
    bits, steps = row["bits"], ceil_div(row["k"], GROUP)
    for tokens in TOKENS:
        name = f"swap {ROWS}x{tokens}x{GROUP}"
        tiles = ceil_div(row["m"], tokens) * ceil_div(row["n"], ROWS)
        yield Candidate(name, ceil_div(tiles, SMS) * counts_of(bits, tokens, steps, 1), 0)
        for split in range(2, min(steps, len(CLUSTERS)) + 1):
            if tiles <= CLUSTERS[split - 1]:
                yield Candidate(f"{name}, K over clusters of {split}", counts_of(bits, tokens, steps, split), 0)
        waves, rest = divmod(tiles, SMS)
        if steps > 1 and 0 < waves <= times.most_waves and 0 < rest <= CLUSTERS[1]:
            counts = waves * counts_of(bits, tokens, steps, 1) + counts_of(bits, tokens, steps, 2)
            yield Candidate(f"{name}, K of the last wave over clusters of 2", counts, times.last_wave)


def choose(row: Row, times: Times, among: set[str] | None = None) -> str:
    some = [c for c in candidates(row, times) if among is None or c.name in among]
    return min(some, key=lambda c: float(c.counts @ times.ns) + c.margin).name


def behind(row: Row, times: Times) -> float:
    """What is chosen over the fastest, of the tiles that the sweep has."""
    tiles = {name: us for name, us in row["us"].items() if name.startswith("swap")}
    return float(tiles[choose(row, times, set(tiles))] / min(tiles.values()))


def fit(rows: list[Row], start: Times) -> Times:
    """Least squares of relative errors; what comes out below zero stands still at it."""
    lines, values = [], []
    for row in rows:
        some = [c for c in candidates(row, start) if c.name in row["us"]]
        us = np.array([row["us"][c.name] for c in some])
        counts = np.array([c.counts for c in some]) / 1000
        weight = (us.min() / us) ** 4 / us
        lines += list((counts - np.average(counts, 0, weight)) * weight[:, None])
        values += list((us - np.average(us, 0, weight)) * weight)
    a, b = np.array(lines), np.array(values)
    free = np.abs(a).max(0) > 0  # what no sweep tells of stays
    ns = np.where(free, 0, start.ns)
    while True:
        ns[free] = np.linalg.lstsq(a[:, free], b - a[:, ~free] @ ns[~free], rcond=None)[0]
        if not (ns < 0).any():
            return Times(np.round(ns), start.last_wave, start.most_waves)
        free &= ns > 0
        ns = np.where(ns < 0, 0, ns)


def report(rows: list[Row], times: Times, title: str) -> None:
    ratios = sorted(((behind(row, times), row) for row in rows), key=lambda pair: -pair[0])
    mean = fmean(ratio for ratio, _ in ratios)
    print(f"{title}: {100 * (mean - 1):.2f} % behind the fastest in the mean of {len(rows)} problems; most:")
    for ratio, row in ratios[:5]:
        chosen = choose(row, times, set(row["us"]))
        print(f"  {100 * (ratio - 1):5.1f} %  {row['bits']} bits, {row['n']}x{row['k']} by {row['m']}: {chosen}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", type=Path, default=SWEEPS)
    parser.add_argument("--from-tokens", type=int, default=33, help="problems of fewer are left out [33]")
    arguments = parser.parse_args()
    rows = [row for path in arguments.sweeps for row in json.loads(path.read_text())["sweep"]]
    rows = [row for row in rows if row["m"] >= arguments.from_tokens]
    now = Times.of_configs(CONFIGS.read_text())
    fitted = fit(rows, now)
    for name, old, new in zip(NAMES, now.ns, fitted.ns, strict=True):
        print(f"{name:20} {old:6.0f} -> {new:6.0f} ns")
    report(rows, now, "configs.h")
    report(rows, fitted, "fitted")


if __name__ == "__main__":
    main()
