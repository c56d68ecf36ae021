"""Fits the times of weight_only_mm's streams and ring on SM90 to sweeps, and says how far behind the fastest their
choices are.

    python tools/weight_only_fit.py [benchmarks/results/nvidia-h100/2026-11-26-weight-only-ring-sweep.json ...]
                                    [--steps 300] [--write]

A file's "sweep" has rows {"bits", "n", "k", "m", "us": {kernel as name_in_sweep calls it: microseconds}}. What a kernel
is said to take is asked of the library's own code, compiled with the numbers of times.h as variables. What a fit makes
small is what choices are expected to lose, a kernel being the likelier chosen the less time it is said to take; errors
of times by themselves tell mostly of kernels that never are. --write puts what was found into times.h.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from weight_only_sweep import name_in_sweep

ROOT = Path(__file__).parents[1]
TIMES = Path("ops/weight_only_mm/times.h")
RESULTS = ROOT / "benchmarks/results"
SWEEPS = [
    RESULTS / "nvidia-h200/2026-11-25-weight-only-streams-sweep.json",
    RESULTS / "nvidia-h100/2026-11-25-weight-only-choice-sweep.json",
    RESULTS / "nvidia-h100/2026-11-26-weight-only-ring-sweep.json",
    RESULTS / "nvidia-h200/2026-11-26-weight-only-ring-sweep.json",
    RESULTS / "nvidia-h200/2026-11-26-weight-only-starts-sweep.json",
]
# GB/s that memory's clock and width amount to.
MEMORY = {"H200": 4917, "H100": 3352}
MOST_TOKENS, STREAM_TOKENS = 16, 8
# Where times.h has the numbers, which weight_only_times.cpp has in this order. Each has a point or an exponent.
PLACES = (
    r"kStreamSteps\[2\]\[2\]\{.*?\n\};",
    r"kStreamTimes\{.*?\n\};",
    r"double latency.*?\} kStreamTime;",
    r"kRingTimes\{.*?\n\};",
    r"kRingSums\{[^}]*\}",
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)")
# Of what was not timed, being slow: over the fastest. And the most that counts.
UNKNOWN, MOST = 0.4, 0.6

Floats = NDArray[np.float64]


def places(text: str) -> list[re.Match[str]]:
    """The numbers of times.h that are fitted."""
    spans = [re.search(pattern, text, re.DOTALL) for pattern in PLACES]
    assert all(spans), "times.h is not as this tool knows it"
    return [found for span in spans if span for found in NUMBER.finditer(text, *span.span())]


def with_numbers(text: str, values: Sequence[float]) -> str:
    """times.h with other numbers, of three digits."""
    for found, value in reversed(list(zip(places(text), values, strict=True))):
        digits = f"{value:.3g}"
        digits += "" if "." in digits or "e" in digits else ".0"
        text = text[: found.start()] + digits + text[found.end() :]
    return text


class Model:
    """The library's times, as functions of the numbers."""

    def __init__(self, text: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            header = Path(folder) / TIMES
            header.parent.mkdir(parents=True)
            header.write_text(text.replace("inline constexpr ", "inline "))
            library = Path(folder) / "times.so"
            flags = "-std=c++20 -O2 -shared -fPIC -fvisibility=hidden -ffunction-sections -Wl,--gc-sections"
            paths = [f"-I{folder}", f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}"]
            source = str(Path(__file__).with_name("weight_only_times.cpp"))
            compiler = shlex.split(os.environ.get("CXX", "c++"))
            subprocess.run([*compiler, *flags.split(), *paths, source, "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))
        self._count = 0

    def numbers(self) -> Floats:
        values = np.empty(self._library.numbers_read(None))
        self._library.numbers_read(values.ctypes.data_as(ctypes.c_void_p))
        return values

    def add(self, m: int, n: int, k: int, bits: int, memory_gb_s: int) -> list[str]:
        """What may serve a problem, as sweeps call it."""
        before, self._count = self._count, self._library.problem_add(m, n, k, bits, 128, memory_gb_s)
        name = ctypes.create_string_buffer(200)
        names = []
        for i in range(before, self._count):
            self._library.candidate_name(i, name, len(name))
            names.append(name_in_sweep(name.value.decode()))
        return names

    def times(self, numbers: Floats) -> Floats:
        """Of all candidates of all problems so far."""
        values, out = np.ascontiguousarray(numbers, float), np.empty(self._count)
        self._library.numbers_write(values.ctypes.data_as(ctypes.c_void_p))
        self._library.times_of(out.ctypes.data_as(ctypes.c_void_p))
        return out


@dataclass
class Problems:
    """The candidates of all problems one after the other: where each problem's begin, and what they took."""

    rows: list[dict[str, Any]]
    first: NDArray[np.int64]
    us: Floats  # nan: not timed
    served: NDArray[np.bool_]  # of those families that the sweep has

    @property
    def lost(self) -> Floats:
        """What the choice of a candidate would lose, over the fastest."""
        fastest = self.spread(np.minimum.reduceat(np.where(np.isnan(self.us), np.inf, self.us), self.first))
        return np.where(np.isnan(self.us), UNKNOWN, np.minimum(self.us / fastest - 1, MOST))

    def spread(self, of_problems: Floats) -> Floats:
        return np.repeat(of_problems, np.diff([*self.first, len(self.us)]))


def read(model: Model, paths: Sequence[Path]) -> Problems:
    """Problems of few tokens. Sweeps older than the ring tell of streams, where nothing else might serve."""
    rows: list[dict[str, Any]] = []
    first: list[int] = []
    us: list[float] = []
    served: list[bool] = []
    for path in paths:
        record = json.loads(path.read_text())
        memory = next(rate for card, rate in MEMORY.items() if card in record["gpu"])
        for row in record["sweep"]:
            has_ring = any(name.startswith("ring") for name in row["us"])
            if row["m"] > (MOST_TOKENS if has_ring else STREAM_TOKENS):
                continue
            names = model.add(row["m"], row["n"], row["k"], row["bits"], memory)
            rows.append({**row, "card": record["gpu"]})
            first.append(len(us))
            us += [row["us"].get(name, np.nan) for name in names]
            served += [has_ring or name.startswith("stream") for name in names]
    return Problems(rows, np.array(first), np.array(us), np.array(served))


def losses(problems: Problems, times: Floats) -> Floats:
    """Of each problem's choice."""
    times = np.where(problems.served, times, np.inf)
    chosen = times <= problems.spread(np.minimum.reduceat(times, problems.first))
    return np.minimum.reduceat(np.where(chosen, problems.lost, np.inf), problems.first)


def cost(lost: Floats) -> float:
    """Of problems' losses: what is more than three percent counts more."""
    return float(lost.mean() + 30 * (np.maximum(lost - 0.03, 0) ** 2).mean())


def objective(problems: Problems, lost: Floats, times: Floats, sharpness: float) -> float:
    """Of expected losses, and a little of the times' own errors."""
    chance = np.where(problems.served, -np.log(times) * sharpness, -np.inf)
    chance = np.exp(chance - problems.spread(np.maximum.reduceat(chance, problems.first)))
    expected = np.add.reduceat(chance * lost, problems.first) / np.add.reduceat(chance, problems.first)
    known = ~np.isnan(problems.us)
    weight = np.maximum(1 - 2.5 * lost[known], 0.1)
    error = np.average(np.log(times[known] / problems.us[known]) ** 2, weights=weight)
    return cost(expected) + 0.3 * float(error)


def fit(model: Model, problems: Problems, start: Floats, steps: int, stiffness: float = 2e-4) -> Floats:
    """Adam over the logarithms of factors, by differences; `stiffness` holds them near 1. The best that it came by, as
    what is chosen is less smooth than what is expected.
    """
    lost = problems.lost
    factors, mean, square = (np.zeros(len(start)) for _ in range(3))
    best, least = start, cost(losses(problems, model.times(start)))

    def value(at: Floats, sharpness: float) -> float:
        times = model.times(start * np.exp(at))
        return objective(problems, lost, times, sharpness) + stiffness * float(at @ at)

    for step in track(range(steps), "fitting"):
        done = step / steps
        sharpness, rate = 50 / (3 - 2 * min(1, done / 0.6)), 0.02 * (1 - 0.9 * done)
        base, width = value(factors, sharpness), 1e-4
        slope = np.array([value(factors + width * unit, sharpness) - base for unit in np.eye(len(start))]) / width
        mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
        correction = np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        factors = factors - rate * correction * mean / (np.sqrt(square) + 1e-8)
        found = start * np.exp(factors)
        if (lost_now := cost(losses(problems, model.times(found)))) < least:
            best, least = found, lost_now
    return best


def report(problems: Problems, times: Floats, title: str) -> None:
    lost = losses(problems, times)
    print(f"{title}: {lost.mean():.2%} behind the fastest in the mean of {len(lost)} problems; most:")
    for i in np.argsort(-lost)[:5]:
        row = problems.rows[i]
        print(f"  {lost[i]:6.1%}  {row['bits']} bits, {row['n']}x{row['k']} by {row['m']}, {row['card']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", type=Path, default=SWEEPS)
    parser.add_argument("--steps", type=int, default=300, help="0: only say how good what serves is [300]")
    parser.add_argument("--write", action="store_true", help="into times.h")
    arguments = parser.parse_args()
    header = ROOT / "src" / TIMES
    model = Model(header.read_text())
    problems, now = read(model, arguments.sweeps), model.numbers()
    report(problems, model.times(now), "times.h")
    if arguments.steps == 0:
        return
    found = fit(model, problems, now, arguments.steps)
    report(problems, model.times(found), "fitted")
    text = with_numbers(header.read_text(), found.tolist())
    if arguments.write:
        header.write_text(text)
    else:
        print("\n".join(text[span.start() : span.end()] for p in PLACES if (span := re.search(p, text, re.DOTALL))))


if __name__ == "__main__":
    main()
