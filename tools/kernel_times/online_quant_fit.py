"""Fits the cost model of online_quant_mm on SM90 to sweeps, and reports the losses of its choices.

    python tools/kernel_times/online_quant_fit.py [sweep.json ...]
                                     [--steps 300] [--write]

online_quant_sweep.py makes the sweeps: rows {"bits", "n", "k", "m", "us": {name: microseconds}}. The modelled times
come from the library's own code, compiled with the parameters as variables. A fit minimises the expected loss of
choices, with choice probabilities from a softmin of the modelled times, because errors of the times themselves would be
dominated by kernels that are never chosen.
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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from online_quant_sweep import name_of

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "src/dispatch/online_quant_mm/costs.h"
# Patterns of the header's parameters, in the order in which online_quant_times.cpp reads them.
PLACES = (r"kMmaTimes\[\]\{.*?\n\};", r"kSm90Steps\[\]\[2\]\{.*?\n\};", r"double mma_power.*?\} kSm90Time;")
SWEEPS = tuple(ROOT / f"tests/kernel_choice/measured/online_quant_{card}.json" for card in ("h100", "h200"))
GROUP = 128  # only this size of group is fitted
# Theoretical memory bandwidth in GB/s.
MEMORY = {"H200": 4917, "H100": 3352}
ANY = range(1 << 31)  # tokens
# Fitted numbers have a decimal point or an exponent.
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)")
# Loss assumed for candidates that a sweep left out as slow, and the upper limit of any loss.
UNKNOWN, MOST = 0.4, 0.6
DIGITS = 3
MOST_BEHIND = 0.08  # losses above this count extra in a climb

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Row = dict[str, Any]


def numbers_in(text: str, names: str = "") -> list[re.Match[str]]:
    """Find the parameters in the places whose patterns begin with a match of `names`."""
    spans = [re.search(pattern, text, re.DOTALL) for pattern in PLACES if re.match(names, pattern)]
    assert all(spans), f"{HEADER.name}: a pattern of PLACES does not match"
    return [found for span in spans if span for found in NUMBER.finditer(text, *span.span())]


def is_among(text: str, names: str) -> Bools:
    """Return for each parameter whether `numbers_in` finds it with these `names`."""
    places = {found.start() for found in numbers_in(text, names)}
    return np.array([found.start() in places for found in numbers_in(text)])


def with_numbers(text: str, values: Sequence[float]) -> str:
    """Replace the parameters in the header's text, rounded to DIGITS digits."""
    for found, value in reversed(list(zip(numbers_in(text), values, strict=True))):
        digits = f"{value:.{DIGITS}g}"
        small_or_whole = "e-" in digits or ("." in digits and "e" not in digits)
        digits = digits if small_or_whole else f"{float(digits):.1f}"
        text = text[: found.start()] + digits + text[found.end() :]
    return text


class Model:
    """The library's modelled times as a function of the parameters, which leave out what is common to all kernels of a
    problem."""

    def __init__(self, text: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            header, library = Path(folder) / HEADER.relative_to(ROOT / "src"), Path(folder) / "times.so"
            header.parent.mkdir(parents=True)
            header.write_text(text.replace("inline constexpr ", "inline "))
            flags = "-std=c++20 -O2 -shared -fPIC -fvisibility=hidden -ffunction-sections -Wl,--gc-sections"
            paths = [f"-I{folder}", f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}"]
            source = str(Path(__file__).with_name("online_quant_times.cpp"))
            compiler = shlex.split(os.environ.get("CXX", "c++"))
            subprocess.run([*compiler, *flags.split(), *paths, source, "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))
        self._count = 0

    def numbers(self) -> Floats:
        values = np.empty(self._library.numbers_read(None))
        self._library.numbers_read(values.ctypes.data_as(ctypes.c_void_p))
        return values

    def add(self, row: Row, memory_gb_s: int) -> list[str]:
        """Add a problem; returns its candidates by their names in sweeps."""
        problem = (row["m"], row["n"], row["k"], row["bits"])
        before, self._count = self._count, self._library.problem_add(*problem, memory_gb_s)
        name = ctypes.create_string_buffer(200)
        names = []
        for i in range(before, self._count):
            self._library.candidate_name(i, name, len(name))
            names.append(name_of(name.value.decode()))
        return names

    def times(self, numbers: Floats) -> Floats:
        """Modelled microseconds of all candidates of all problems added so far."""
        values, out = np.ascontiguousarray(numbers, float), np.empty(self._count)
        self._library.numbers_write(values.ctypes.data_as(ctypes.c_void_p))
        self._library.times_of(out.ctypes.data_as(ctypes.c_void_p))
        return out


class Problems:
    """The concatenated candidates of all problems, with their measured times. Only kernels that a sweep timed count."""

    def __init__(self, model: Model, paths: Iterable[Path], among: range = ANY) -> None:
        self.rows: list[Row] = []
        first: list[int] = []
        us: list[float] = []
        for path in paths:
            record = json.loads(path.read_text())
            memory = next(rate for card, rate in MEMORY.items() if card in record["gpu"])
            for row in record["sweep"]:
                if row["m"] not in among or row.get("group", GROUP) != GROUP:
                    continue
                names = model.add(row, memory)
                self.rows.append({**row, "card": record["gpu"]})
                first.append(len(us))
                us += [row["us"].get(name, np.nan) for name in names]
        self.first, self.us = np.array(first), np.array(us)
        self.known = ~np.isnan(self.us)
        self.fastest = self.spread(self.least(np.where(self.known, self.us, np.inf)))
        # Loss of choosing each candidate, relative to the fastest.
        self.lost = np.where(self.known, np.minimum(self.us / self.fastest - 1, MOST), UNKNOWN)
        self._weight = np.where(self.known, np.maximum(1 - 2.5 * self.lost, 0.1), 0)

    def least(self, values: Floats) -> Floats:
        return np.asarray(np.minimum.reduceat(values, self.first))

    def mean(self, values: Floats, weight: Floats) -> Floats:
        """Weighted mean over each problem's candidates."""
        return np.asarray(np.add.reduceat(values * weight, self.first) / np.add.reduceat(weight, self.first))

    def spread(self, of_problems: Floats) -> Floats:
        return np.repeat(of_problems, np.diff([*self.first, len(self.us)]))

    def chosen(self, times: Floats) -> NDArray[np.int64]:
        """Index of the fastest candidate of each problem; the first one of equals."""
        fastest = np.where(times <= self.spread(self.least(times)), np.arange(len(times)), len(times) - 1)
        return np.asarray(np.minimum.reduceat(fastest, self.first))

    def losses(self, times: Floats) -> Floats:
        """Loss of each problem's choice."""
        return np.asarray(self.lost[self.chosen(np.where(self.known, times, np.inf))])

    def unknown(self, times: Floats) -> int:
        """Number of problems whose choice among all candidates was not timed."""
        return int((~self.known[self.chosen(times)]).sum())

    def objective(self, times: Floats, sharpness: float) -> float:
        """Expected loss, plus a small multiple of the squared errors of log times."""
        chance = np.where(self.known, -times / self.fastest * sharpness, -np.inf)
        chance = np.exp(chance + self.spread(self.least(-chance)))
        errors = np.where(self.known, times - np.where(self.known, self.us, 0), 0) / self.fastest
        errors = errors - self.spread(self.mean(errors, self._weight))
        error = np.average(self.mean(errors**2, self._weight))
        return cost(self.mean(self.lost, chance)) + 0.3 * float(error)


def cost(lost: Floats) -> float:
    """Mean of the problems' losses, in which losses above three percent count extra."""
    return float(lost.mean() + 100 * (np.maximum(lost - 0.03, 0) ** 2).mean())


def fit(
    model: Model, problems: Problems, start: Floats, steps: int, free: Bools | None = None, stiffness: float = 2e-5
) -> Floats:
    """Fit by Adam over the logarithms of factors of the `free` parameters, with finite differences.

    `stiffness` pulls the factors to 1. Returns the best iterate by actual choices, which are less smooth than the
    objective.
    """
    factors, slope, mean, square = (np.zeros(len(start)) for _ in range(4))
    free = np.ones(len(start), bool) if free is None else free
    best, least = start, cost(problems.losses(model.times(start)))

    def value(at: Floats, sharpness: float) -> float:
        return problems.objective(model.times(start * np.exp(at)), sharpness) + stiffness * float(at @ at)

    for step in track(range(steps), "fitting"):
        done, width = step / steps, 1e-4
        sharpness, rate = 50 / (3 - 2 * min(1, done / 0.6)), 0.02 * (1 - 0.9 * done)
        base = value(factors, sharpness)
        slope[free] = [(value(factors + width * unit, sharpness) - base) / width for unit in np.eye(len(start))[free]]
        mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
        correction = np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        factors = factors - rate * correction * mean / (np.sqrt(square) + 1e-8)
        found = start * np.exp(factors)
        if (now := cost(problems.losses(model.times(found)))) < least:
            best, least = found, now
    return best


def climb(model: Model, problems: Problems, start: Floats, steps: int, free: Bools) -> Floats:
    """Improve the actual choices by random steps, since their losses have no gradient.

    Parameters are pulled loosely to their start, so that they do not overfit a few problems, and are rounded as they
    will be written, since choices may depend on the rounding.
    """
    random, places = np.random.default_rng(0), np.flatnonzero(free)
    factors = np.zeros(len(start))

    def numbers(at: Floats) -> Floats:
        return np.array([float(f"{value:.{DIGITS}g}") for value in start * np.exp(at)])

    def value(at: Floats) -> float:
        lost = problems.losses(model.times(numbers(at)))
        return float(lost.mean() + np.maximum(lost - MOST_BEHIND, 0).sum() + 0.004 * at @ at)

    least = value(factors)
    for _ in track(range(steps), "climbing"):
        step, some = factors.copy(), random.choice(places, min(3, len(places)), replace=False)
        step[some] += random.normal(0, 0.03) * random.standard_exponential() ** 2
        if (now := value(step)) < least:
            factors, least = step, now
    return numbers(factors)


def report(problems: Problems, times: Floats, title: str) -> None:
    lost = problems.losses(times)
    print(f"{title}: {lost.mean():.2%} slower than the fastest on average over {len(lost)} problems,")
    print(f"  {problems.unknown(times)} of which choose a kernel that their sweep left out; worst:")
    for i in np.argsort(-lost)[:5]:
        row = problems.rows[i]
        print(f"  {lost[i]:6.1%}  {row['bits']} bits, {row['n']}x{row['k']} by {row['m']}, {row['card']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", type=Path, default=[*SWEEPS])
    parser.add_argument("--tokens", default="0:", help="range of tokens FROM:BELOW of the fitted problems [0:]")
    parser.add_argument("--only", default="", help="fit only parameters whose places match, such as kMmaTimes [all]")
    parser.add_argument("--steps", type=int, default=300, help="gradient steps; 0 only reports the current fit [300]")
    parser.add_argument("--climb", type=int, default=30000, help="random steps after the gradient steps [30000]")
    parser.add_argument("--write", action="store_true", help=f"write the fit to {HEADER.name}")
    arguments = parser.parse_args()
    text = HEADER.read_text()
    model = Model(text)
    first, _, end = arguments.tokens.partition(":")
    among = range(int(first), int(end or ANY.stop))
    problems, now = Problems(model, arguments.sweeps, among), model.numbers()
    report(problems, model.times(now), HEADER.name)
    if arguments.steps == arguments.climb == 0:
        return
    free = is_among(text, arguments.only)
    if not free.any():
        parser.error(f"--only: expected a pattern that matches the beginning of a place, got {arguments.only}")
    found = fit(model, problems, now, arguments.steps, free)
    report(problems, model.times(found), "fitted")
    found = climb(model, problems, found, arguments.climb, free)
    report(problems, model.times(found), "climbed")
    if arguments.write:
        HEADER.write_text(with_numbers(text, found.tolist()))
    else:
        print(", ".join(f"{value:.3g}" for value in found))


if __name__ == "__main__":
    main()
