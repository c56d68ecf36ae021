"""Fits weight_only_mm's cost model to measured times and writes it to the headers; used by tools/tune.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import epiloq
from epiloq import _core

COST = Path(__file__).parents[1] / "src/dispatch/weight_only_mm/cost"
MEMORY = {"NVIDIA H200": 4917, "NVIDIA H100 80GB HBM3": 3352}
"""Theoretical memory bandwidth in GB/s, for sweeps that do not record it."""

Floats = NDArray[np.float64]

GEMV = re.compile(r"gemv (\d+) panels of 16 weight rows, (\d+) warps along K, stages (\d+)(, tokens as integers)?")
DECODE = re.compile(r"decode (\d+) weight rows x (\d+) tokens, (\d+) warps, (\d) along K")
WGMMA = re.compile(r"wgmma (\d+) weight rows x (\d+) tokens, (\d+) warpgroups(?:, (\d) along K)?(, weights rounded.*)?")
# (panels, warps, stages) of a GEMV row -> its minimum of CTAs per SM, which is part of its name in sweeps.
BLOCKS = {
    **{"4,16,2": 1, "4,8,3": 2, "7,4,3": 1, "7,4,2": 2, "8,4,2": 2, "4,4,2": 4, "4,4,3": 3},
    **{"2,16,2": 1, "2,8,3": 2, "2,4,3": 4, "1,16,3": 2, "1,16,2": 2, "1,4,2": 2},
}


def name_in_sweep(explained: str) -> str:
    """Translate a kernel's description by `explain` to its name in the sweeps of tests/kernel_choice/measured.

    Names are "gemv panels,warps,stages,blocks", "decode m_groups,k_groups,panels,tokens" or
    "wgmma m_groups,k_groups,blocks,tokens", followed by for example " split 2" with split-K.
    """
    kernel, _, split = explained.partition(", K over clusters of ")
    if found := GEMV.fullmatch(kernel):
        row = ",".join(found.groups()[:3])
        name = f"gemv {row},{BLOCKS[row]}" + (",d" if found[4] else "")
    elif found := DECODE.fullmatch(kernel):
        rows, tokens, warps, groups = map(int, found.groups())
        name = f"decode {warps // groups},{groups},{rows * groups // warps // 16},{tokens}"
    else:
        found = WGMMA.fullmatch(kernel)
        assert found, kernel
        rows, tokens, warpgroups, groups = (int(number or 1) for number in found.groups()[:4])
        warpgroups //= groups
        name = f"wgmma {warpgroups},{groups},{rows // warpgroups // 64},{tokens}" + (",r" if found[5] else "")
    return f"{name} split {split}" if split else name


@dataclass(frozen=True)
class Timed:
    """A problem of weight_only_mm with the times of its candidates in the library's order, NaN if not timed."""

    part: str
    memory_gb_s: int
    bits: int
    m: int
    n: int
    k: int
    names: tuple[str, ...]
    us: Floats
    complete: bool  # whether slow candidates were timed

    def expected(self, costs: Sequence[float]) -> list[tuple[tuple[str, int, int], float]]:
        """Return candidates (family, row, split) and their times by the cost model."""
        return _core.expected_weight_only_mm(self.m, self.n, self.k, self.bits, self.memory_gb_s, list(costs))

    def chosen(self) -> int:
        """Index of the candidate that the library chooses."""
        sizes = {"m": self.m, "n": self.n, "k": self.k, "bits": self.bits}
        return self.names.index(epiloq.explain("weight_only_mm", **sizes, memory_gb_s=self.memory_gb_s))

    @property
    def layer(self) -> tuple[int, int]:
        return self.n, self.k


def load(path: Path) -> list[Timed]:
    """Read the problems of weight_only_mm from a file written by `time` or by an earlier sweep."""
    record = json.loads(path.read_text())
    memory = record.get("memory_gb_s") or MEMORY[record["gpu"]]
    found = []
    with epiloq.config(arch="sm90"):
        for row in record["sweep"]:
            if row.get("operation", "weight_only_mm") != "weight_only_mm":
                continue
            sizes = [row[name] for name in ("m", "n", "k", "bits")]
            names = [name for name, _ in _core.candidates_weight_only_mm(-1, *sizes)[2]]
            keys = names if "operation" in row else ["" if n.startswith(DENSE) else name_in_sweep(n) for n in names]
            us = np.array([row["us"].get(key) or np.nan for key in keys])
            m, n, k, bits = sizes
            if not np.isnan(us).all():
                found.append(Timed(row.get("part", "fit"), memory, bits, m, n, k, tuple(names), us, "operation" in row))
    return found


DENSE = "dequantise"
UNKNOWN, MOST = 0.4, 0.6
"""Loss assumed for a candidate that an incomplete sweep left out as slow, and the upper limit of any loss."""


def loss(problem: Timed, costs: Sequence[float] | None = None) -> float:
    """Relative excess over the fastest candidate's time, for the choice with these costs or the library's own.

    It is 0 for a dense product, which is not timed.
    """
    if costs is None:
        index = problem.chosen()
        if problem.names[index].startswith(DENSE):
            return 0.0
    else:
        times = [us for _, us in problem.expected(costs)]
        index = int(np.argmin(np.where(timed_kernels(problem), times, np.inf)))
    us = problem.us[index]
    return float(UNKNOWN if np.isnan(us) else us / np.nanmin(problem.us) - 1)


def timed_kernels(problem: Timed) -> NDArray[np.bool_]:
    """Mask of candidates to be judged: all except a dense product; in a complete sweep only those timed."""
    known = ~np.isnan(problem.us)
    if problem.complete:
        return known
    return np.array([not name.startswith(DENSE) for name in problem.names])


class Objective:
    """Objectives of a fit, as functions of the parameters' logarithms."""

    HALF_LIFE = 0.15  # excess over the fastest time that halves a candidate's weight

    def __init__(self, all_problems: Sequence[Timed]) -> None:
        self.problems = all_problems
        self.of = np.repeat(np.arange(len(all_problems)), [len(p.us) for p in all_problems])
        us = np.concatenate([p.us for p in all_problems])
        best = np.array([np.nanmin(p.us) for p in all_problems])[self.of]
        self.valid = np.concatenate([timed_kernels(p) for p in all_problems])
        self.known = self.valid & ~np.isnan(us)
        self.log_us = np.log(np.where(self.known, us, 1))
        self.loss = np.where(self.known, np.minimum(us / best - 1, MOST), UNKNOWN)
        near = np.exp(-np.minimum((us / best - 1) / self.HALF_LIFE, 6)) + 0.02
        self.weight = np.where(self.known, near, 0)
        self.complete = np.array([p.complete for p in all_problems])

    def expected(self, costs: Sequence[float]) -> Floats:
        """Logarithms of the modelled times of all candidates."""
        return np.log([us for problem in self.problems for _, us in problem.expected(costs)])

    def errors(self, costs: Sequence[float]) -> Floats:
        """Weighted errors of log times; those of incomplete sweeps, made with another timer, are centred first."""
        error = np.where(self.known, self.expected(costs) - self.log_us, 0)
        other = self.known & ~self.complete[self.of]
        if other.any():
            error[other] -= np.average(error[other], weights=self.weight[other])
        return np.asarray(np.sqrt(self.weight) * error)

    def expected_loss(self, costs: Sequence[float], temperature: float) -> float:
        """Mean loss if candidates are chosen with probabilities from a softmin of the modelled times."""
        times = np.where(self.valid, self.expected(costs), np.inf)
        least = np.full(len(self.problems), np.inf)
        np.minimum.at(least, self.of, times)
        share = np.exp(-(times - least[self.of]) / temperature)
        mean = np.bincount(self.of, share * self.loss) / np.bincount(self.of, share)
        return float(np.average(mean, weights=np.where(self.complete, 1, 0.5)))


def varied(costs: Floats, which: NDArray[np.bool_]) -> Callable[[Floats], list[float]]:
    """Return a function from the logarithms of the free parameters to all parameters."""

    def costs_of(logs: Floats) -> list[float]:
        result = costs.copy()
        result[which] = np.exp(logs)
        return [float(value) for value in result]

    return costs_of


# Parameters from data sheets, which are not fitted.
GIVEN = ("tensor",)
OF_TIMES = ("tensor", "memory_efficiency", "sm_load", "start", "latency", "cluster", "tensor_sustained")
TEMPERATURE, OF_ERRORS, NEAR_START, NEAR_ONE = 0.03, 1.5, 0.5, 1.0


def fit_times(named: Mapping[str, float], all_problems: Sequence[Timed]) -> dict[str, float]:
    """Fit the model's parameters to times by least squares, with all kernels' factors at 1."""
    from scipy.optimize import least_squares

    costs = np.array([1 if name.startswith("factors") else value for name, value in named.items()])
    which = np.array([not name.startswith("factors") and name not in GIVEN for name in named])
    goal, costs_of = Objective([problem for problem in all_problems if problem.complete]), varied(costs, which)
    found = least_squares(lambda logs: goal.errors(costs_of(logs)), np.log(costs[which]), loss="soft_l1", f_scale=0.1)
    return dict(zip(named, costs_of(found.x), strict=True))


def fit_choices(
    named: Mapping[str, float], all_problems: Sequence[Timed], iterations: int
) -> tuple[float, dict[str, float]]:
    """Fit the kernels' parameters to choices, starting from these, with the card's fixed; returns objective and fit."""
    from scipy.optimize import minimize

    costs, which = np.array(list(named.values())), np.array([name not in OF_TIMES for name in named])
    start = np.log([1 if name.startswith("factors") else value for name, value in named.items()])[which]
    near = np.array([NEAR_ONE if name.startswith("factors") else NEAR_START for name in named])[which]
    goal, costs_of = Objective(all_problems), varied(costs, which)

    def cost(logs: Floats) -> float:
        now = costs_of(logs)
        errors = (goal.errors(now) ** 2).sum() / goal.weight.sum()
        far = (near * (logs - start) ** 2).mean()
        return float(goal.expected_loss(now, TEMPERATURE) + OF_ERRORS * errors + far)

    found = minimize(cost, np.log(costs[which]), method="L-BFGS-B", options={"maxiter": iterations, "maxfun": 10**6})
    return goal.expected_loss(costs_of(found.x), TEMPERATURE), dict(zip(named, costs_of(found.x), strict=True))


def fit(all_problems: Sequence[Timed], iterations: int = 100) -> dict[str, float]:
    """Fit the card's parameters to times, then the kernels' to choices; starts from the library's if better."""
    now = dict(_core.weight_only_mm_costs())
    found = [fit_choices(start, all_problems, iterations) for start in (fit_times(now, all_problems), now)]
    return min(found, key=lambda each: each[0])[1]


FAMILIES = {"gemv": "kGemv", "decode": "kDecode", "wgmma": "kWgmma"}
MISSED = 0.04
"""Layers with a loss above this are listed in the table of measured layers."""


def missed(all_problems: Sequence[Timed], costs: Sequence[float]) -> list[str]:
    """Return the rows of measured.h. For one problem, a complete sweep takes precedence."""
    rows: dict[tuple[int, ...], str] = {}
    for p in sorted(all_problems, key=lambda p: not p.complete):
        key = (p.memory_gb_s, p.bits, p.m, p.n, p.k)
        if key in rows or loss(p, costs) <= MISSED:
            rows.setdefault(key, "")
            continue
        family, row, split = p.expected(costs)[int(np.nanargmin(p.us))][0]
        if family not in FAMILIES:  # the dense product, which the table cannot choose
            rows[key] = ""
            continue
        rows[key] = f"    {{{', '.join(map(str, key))}, {{Family::{FAMILIES[family]}, {row}, {split}}}}},\n"
    return [row for _, row in sorted(rows.items()) if row]


BEGIN, END = "// [tools/tune.py: begin]\n", "// [tools/tune.py: end]\n"


def replaced(text: str, block: str) -> str:
    """Replace the generated block of a header."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + block + END + rest.split(END)[1]


def costs_block(costs: Mapping[str, float]) -> str:
    """Return the C++ definition of kSm90Costs."""
    hardware = [name for name in costs if not name.startswith("factors")]
    first_warp = hardware.index("gemv")
    parts = [hardware[:first_warp], hardware[first_warp:]]
    lines = ["inline constexpr Costs kSm90Costs{\n"]
    for part in parts:
        lines += ["    {\n", *(f"        .{name} = {costs[name]:.3g},\n" for name in part), "    },\n"]
    lines.append("    {\n")
    for family in ("gemv", "decode", "wgmma"):
        factors = [f"{value:.3g}" for name, value in costs.items() if name.startswith(f"factors.{family}[")]
        lines.append(f"        .{family} = {{{', '.join(factors)}}},\n")
    return "".join([*lines, "    },\n", "};\n"])


def write_measured(path: Path, rows: Sequence[str]) -> None:
    """Write the table of measured layers."""
    block = f"inline constexpr Measured kMeasured[]{{\n{''.join(rows)}}};\n"
    path.write_text(replaced(path.read_text(), block))
    print(f"wrote {path}: {len(rows)} measured layers")


def write(all_problems: Sequence[Timed], costs: Mapping[str, float]) -> None:
    """Write the parameters and the table of measured layers to the sources."""
    written = {name: float(f"{value:.3g}") for name, value in costs.items()}
    path = COST / "costs.h"
    path.write_text(replaced(path.read_text(), costs_block(written)))
    write_measured(COST / "measured.h", missed(all_problems, list(written.values())))


def same_card(memory_gb_s: int, other: int) -> bool:
    """Whether cards of two memory rates are of one model, as dispatch decides it: they differ by a few percent."""
    return abs(memory_gb_s - other) * 20 <= other


def add(all_problems: Sequence[Timed], path: Path = COST / "measured.h") -> None:
    """Write the rows of these problems to the table of measured layers; parameters and other problems' rows stay."""
    rows = path.read_text().split(BEGIN)[1].split(END)[0].splitlines(keepends=True)[1:-1]

    def is_timed(row: str) -> bool:
        memory, *problem = (int(number) for number in row.split("{")[1].split(",")[:5])
        return any(same_card(p.memory_gb_s, memory) and [p.bits, p.m, p.n, p.k] == problem for p in all_problems)

    others = [row for row in rows if not is_timed(row)]
    write_measured(path, others + missed(all_problems, [value for _, value in _core.weight_only_mm_costs()]))
