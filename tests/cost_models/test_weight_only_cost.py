"""weight_only_mm's cost model: its terms as `explain` prints them, and the tool that fits it."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import cost_fit
import epiloq
from epiloq import _core

H100, H200 = 3352, 4917  # GB/s: the product of the memory's clock and width
SIZES = ((1024, 4096), (4096, 4096), (3584, 18944), (28672, 4096), (5000, 1111))
PROBLEMS = [
    {"m": m, "n": n, "k": k, "bits": bits}
    for (n, k), m, bits in itertools.product(SIZES, (1, 4, 8, 16, 48, 100, 200, 1000), (4, 8))
]
EXPECTED = re.compile(r"  expected ([\d.]+) us: start ([\d.]+) \+ first load ([\d.]+) \+ the longer of memory and SMs")
MEMORY = re.compile(r"  memory ([\d.]+) us: ([\d.]+) MB of weights at (\d+) GB/s")
SMS = re.compile(
    r"  SMs ([\d.]+) us: (\d+) CTAs in (\d+) waves?, (\d) per SM; K steps per CTA (\d+): arithmetic ([\d.]+), "
    r"loads ([\d.]+), cluster ([\d.]+), store ([\d.]+)"
)
POWER = re.compile(r"  tensor cores at the power limit ([\d.]+) us")
ROUNDED = 0.06  # of a printed number


def kernels(terms: str) -> list[tuple[str, list[str]]]:
    """The kernels of `explain`'s terms, with their lines."""
    parts = re.split(r"^(?:chosen|runner-up): ", terms, flags=re.MULTILINE)[1:]
    return [(head, rest) for head, *rest in (part.splitlines() for part in parts)]


def numbers(pattern: re.Pattern[str], line: str) -> list[float]:
    found = pattern.fullmatch(line)
    assert found, line
    return [float(number) for number in found.groups()]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_terms_make_the_expected_time(problem: dict[str, int]) -> None:
    terms = epiloq.explain("weight_only_mm", **problem, group_size=128, terms=True)
    parts = kernels(terms)
    assert len(parts) == 2 and parts[0][0] == epiloq.explain("weight_only_mm", **problem, group_size=128)
    with epiloq.config(arch="sm90"):
        expected = dict(_core.candidates_weight_only_mm(-1, **problem)[2])
    for name, lines in parts:
        if name.startswith(cost_fit.DENSE):
            assert lines[0] == f"  expected {expected[name]:.1f} us"
            continue
        us, start, first_load = numbers(EXPECTED, lines[0])
        assert abs(us - expected[name]) < ROUNDED
        memory, megabytes, rate = numbers(MEMORY, lines[1])
        # Whole panels of padded rows; scales of two bytes a group.
        weights = problem["n"] * math.ceil(problem["k"] / 128) * (16 * problem["bits"] + 2) * 1e-6
        assert weights - ROUNDED < megabytes < weights * 1.3 + ROUNDED  # whole CTA tiles
        assert rate < H100 and abs(memory - megabytes / rate * 1e3) < ROUNDED * (1 + 1e3 / rate)
        sms, ctas, waves, resident, steps, arithmetic, loads, cluster, store = numbers(SMS, lines[2])
        splits = re.search(r"clusters of (\d)", name)
        split = int(splits[1]) if splits else 1
        assert ctas % split == 0 and ctas <= waves * resident * 132 and (split > 1) == (cluster > 0)
        assert steps == math.ceil(math.ceil(problem["k"] / 128) / split)
        wave = max(arithmetic, loads) + cluster + store
        assert waves * (wave - 4 * ROUNDED) <= sms + ROUNDED  # overlap makes it longer, as do starts of later waves
        power = numbers(POWER, lines[3])[0] if name.startswith("wgmma") else 0
        # The longer, and at most both.
        factor = 1.25  # of a kernel, at most
        assert max(start + first_load + max(memory, sms), power) / factor <= us + ROUNDED
        assert us <= factor * (start + first_load + memory + sms + power) + ROUNDED


def test_the_runner_up_is_the_next_best() -> None:
    for problem in PROBLEMS:
        terms = epiloq.explain("weight_only_mm", **problem, group_size=128, terms=True)
        (chosen, _), (next_best, _) = kernels(terms)
        with epiloq.config(arch="sm90"):
            expected = dict(_core.candidates_weight_only_mm(-1, **problem)[2])
        by_time = sorted(expected, key=expected.__getitem__)
        if "as measured" in terms:
            assert next_best == next(name for name in by_time if name != chosen)
        else:
            assert [chosen, next_best] == by_time[:2], problem


def test_terms_of_a_call() -> None:
    """By its own arguments, also of targets without a model for all kernels."""
    weight = epiloq.pack_weight(
        torch.zeros(256, 512, dtype=torch.int8), torch.ones(256, 4, dtype=torch.bfloat16), bits=4, group_size=128
    )
    x = torch.zeros(100, 512, dtype=torch.bfloat16)
    for arch, begins in (("sm90", "wgmma"), ("sm80", "mma.sync")):
        with epiloq.config(arch=arch):
            terms = epiloq.explain("weight_only_mm", x, weight, terms=True)
            name = epiloq.explain("weight_only_mm", x, weight)
        assert kernels(terms)[0][0] == name and name.startswith(begins)
        assert ("no cost model" in terms) == (arch == "sm80")


def test_terms_without_columns() -> None:
    terms = epiloq.explain("weight_only_mm", m=1, n=16, k=0, terms=True)
    assert terms.splitlines()[0] == "chosen: dequantise, then a dense product (no columns)"


def test_estimated_costs_match_the_choice() -> None:
    costs = [value for _, value in _core.weight_only_mm_costs()]
    with epiloq.config(arch="sm90"):
        for problem in PROBLEMS:
            ours = [us for _, us in _core.expected_weight_only_mm(**problem, memory_gb_s=H100, costs=costs)]
            assert ours == [us for _, us in _core.candidates_weight_only_mm(-1, **problem)[2]]
    with pytest.raises(ValueError, match="expected 53 numbers, got 3"):
        _core.expected_weight_only_mm(1, 64, 128, 4, H100, [1.0, 2.0, 3.0])


def test_more_of_each_costs_more() -> None:
    """A time grows with each number that is a time, and with the inverse of each that is a rate."""
    named = _core.weight_only_mm_costs()
    rates = {"memory_efficiency", "sm_load", "tensor", "tensor_sustained", "overlap"}
    for i, (name, value) in enumerate(named):
        slower = [other for _, other in named]
        slower[i] = value / 1.5 if name in rates else value * 1.5
        grew = False
        for problem in PROBLEMS:
            before = _core.expected_weight_only_mm(**problem, memory_gb_s=H100, costs=[v for _, v in named])
            after = _core.expected_weight_only_mm(**problem, memory_gb_s=H100, costs=slower)
            pairs = [(old, new) for (_, old), (_, new) in zip(before, after, strict=True)]
            assert all(new >= old * (1 - 1e-12) for old, new in pairs), (name, problem)
            grew = grew or any(new > old for old, new in pairs)
        assert grew, name


ROW = re.compile(r"\{(\d+), (\d+), (\d+), (\d+), (\d+), \{Family::k(\w+), (\d+), (\d+)\}\},")


def test_measured_layers_take_the_measured_kernel() -> None:
    header = cost_fit.COST / "measured.h"
    if not header.exists():
        pytest.skip("needs the checkout")
    rows = ROW.findall(header.read_text())
    assert len(rows) > 20
    costs = [value for _, value in _core.weight_only_mm_costs()]
    families = {name.removeprefix("k").lower(): family for family, name in cost_fit.FAMILIES.items()}
    with epiloq.config(arch="sm90"):
        for *sizes, family, row, split in rows:
            memory, bits, m, n, k = map(int, sizes)
            kernels = [kernel for kernel, _ in _core.expected_weight_only_mm(m, n, k, bits, memory, costs)]
            names = [name for name, _ in _core.candidates_weight_only_mm(-1, m, n, k, bits)[2]]
            name = names[kernels.index((families[family.lower()], int(row), int(split)))]
            problem = {"m": m, "n": n, "k": k, "bits": bits, "memory_gb_s": memory}
            assert epiloq.explain("weight_only_mm", **problem) == name
            assert "as measured" in epiloq.explain("weight_only_mm", **problem, terms=True)
            # Only of what was measured: other cards and scale groups have the model's choice.
            for other in ({"sm_count": 100}, {"group_size": 32}):
                assert "as measured" not in epiloq.explain("weight_only_mm", **{**problem, **other}, terms=True)


NOISE = 0.005  # of a measured time


def timed(costs: list[float], memory: int, part: str, random: np.random.Generator) -> list[cost_fit.Timed]:
    """Problems whose times are those of a model of other numbers, with noise."""
    found = []
    for problem in PROBLEMS[:: 3 if part == "fit" else 7]:
        with epiloq.config(arch="sm90"):
            names = [name for name, _ in _core.candidates_weight_only_mm(-1, **problem)[2]]
        expected = _core.expected_weight_only_mm(**problem, memory_gb_s=memory, costs=costs)
        us = np.array([us for _, us in expected]) * random.normal(1, NOISE, len(names))
        us[[name.startswith(cost_fit.DENSE) for name in names]] = np.nan
        sizes = (problem[name] for name in ("bits", "m", "n", "k"))
        found.append(cost_fit.Timed(part, memory, *sizes, tuple(names), us, True))
    return found


def test_a_fit_finds_the_numbers_of_a_card(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    if not cost_fit.COST.exists():
        pytest.skip("needs the checkout")
    random = np.random.default_rng(seed)
    named = _core.weight_only_mm_costs()
    names = [name for name, _ in named]
    fixed = np.array([name.startswith("factors") or name in cost_fit.GIVEN for name in names])
    other = np.where(fixed, 1, np.exp(random.normal(0, 0.15, len(named)))) * [value for _, value in named]
    other[[name.startswith("factors") for name in names]] = 1
    problems = timed(other.tolist(), H200, "fit", random)
    of_times = cost_fit.fit_times(dict(named), problems)
    assert list(of_times) == names and of_times["tensor"] == dict(named)["tensor"]
    for name in ("memory_efficiency", "start"):
        assert abs(of_times[name] / other[names.index(name)] - 1) < 0.05, name
    # Of problems that it has not seen, times to within their noise, and so the choices.
    held = timed(other.tolist(), H200, "held", random)
    errors = cost_fit.Objective(held)
    weights = errors.weight[errors.known]
    assert np.mean(errors.errors(list(of_times.values()))[errors.known] ** 2) < np.mean(weights) * (1.5 * NOISE) ** 2
    assert np.mean([cost_fit.loss(problem, list(of_times.values())) for problem in held]) < 0.01
    # A fit of the choices makes its problems' choices better than both the numbers it may begin with.
    found = cost_fit.fit(problems, iterations=2)
    goal = cost_fit.Objective(problems)
    after, *before = (
        goal.expected_loss(list(numbers.values()), cost_fit.TEMPERATURE) for numbers in (found, of_times, dict(named))
    )
    assert after < min(before)

    for name in ("costs.h", "measured.h"):
        (tmp_path / name).write_text((cost_fit.COST / name).read_text())
    monkeypatch.setattr(cost_fit, "COST", tmp_path)
    cost_fit.write(problems, found)
    text = (tmp_path / "costs.h").read_text()
    for name, value in list(found.items())[:20]:
        assert f".{name} = {value:.3g}," in text
    assert len(ROW.findall((tmp_path / "measured.h").read_text())) == sum(
        cost_fit.loss(problem, [float(f"{value:.3g}") for value in found.values()]) > cost_fit.MISSED
        for problem in problems
    )


def test_the_header_is_what_the_tool_writes() -> None:
    header = cost_fit.COST / "costs.h"
    if not header.exists():
        pytest.skip("needs the checkout")
    text = header.read_text()
    assert cost_fit.replaced(text, cost_fit.costs_block(dict(_core.weight_only_mm_costs()))) == text


def test_names_in_sweeps_are_unique() -> None:
    with epiloq.config(arch="sm90"):
        for problem in PROBLEMS:
            names = [name for name, _ in _core.candidates_weight_only_mm(-1, **problem)[2]]
            short = [cost_fit.name_in_sweep(name) for name in names if not name.startswith(cost_fit.DENSE)]
            assert len(set(short)) == len(short)
