"""The cost model of scaled_mm's and groupwise_mm's SM90 tiles: its terms as `explain` prints them."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

import epiloq
from epiloq import _core

NUMBER = r"([\d.]+)"
EXPECTED = re.compile(rf"  expected {NUMBER} us: (\d+) CTA tiles on (\d+) SMs")
STEPS = rf"(\d+) K steps of {NUMBER} us \+ end {NUMBER} us"
WAVES = re.compile(rf"  (\d+) waves?, (?:each )?{STEPS}")
SPLIT = re.compile(rf"  (\d+) tiles with K over 2 CTAs, {STEPS} \+ reduction {NUMBER} us")
DELAY = re.compile(rf"  delay of the next kernel {NUMBER} us \(decides only whether K is split\)")
HALF = {2: 0.0051, 3: 0.00051}  # of the last of so many decimals
SIZES = ((1024, 4096), (4096, 4096), (3584, 18944), (28672, 4096), (5000, 1280))
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("scaled_mm", {"dtype": "int8"}),
    "float8": ("scaled_mm", {"dtype": "float8_e4m3fn"}),
    "fast": ("scaled_mm", {"dtype": "float8_e4m3fn", "fast_accum": True}),
    "groups": ("groupwise_mm", {}),
    "columns": ("groupwise_mm", {"column_scales": True}),
}


def kernels(terms: str) -> list[tuple[str, list[str]]]:
    """The kernels of `explain`'s terms, the chosen one first, with their lines."""
    parts = re.split(r"^(?:chosen|runner-up): ", terms, flags=re.MULTILINE)[1:]
    return [(head, rest) for head, *rest in (part.splitlines() for part in parts)]


def check_sum(name: str, lines: list[str], k: int, expected: dict[str, float]) -> float:
    """Check that a kernel's terms add up to its expected time, and return it with the delay of the next kernel."""
    head, delay = EXPECTED.fullmatch(lines[0]), DELAY.fullmatch(lines[-1])
    assert head and delay, lines
    us, tiles, sms = float(head[1]), int(head[2]), int(head[3])
    assert sms == 132 and abs(us - expected[name]) < HALF[2]
    total, rounding, unsplit = 0.0, HALF[2], tiles
    for line in lines[1:-1]:
        waves, split = WAVES.fullmatch(line), SPLIT.fullmatch(line)
        found = waves or split
        assert found, line
        count, steps, step, end = int(found[1]), int(found[2]), float(found[3]), float(found[4])
        repeated = count if waves else 1
        total += repeated * (steps * step + end) + (float(split[5]) if split else 0)
        rounding += repeated * (steps * HALF[3] + HALF[2]) + HALF[2]
        assert steps == math.ceil(math.ceil(k / 128) / (2 if split else 1))
        if split:
            unsplit -= count
    waves = WAVES.fullmatch(lines[1])
    assert (int(waves[1]) if waves else 0) == math.ceil(unsplit / sms)
    assert abs(total - us) < rounding
    return us + float(delay[1])


@pytest.mark.parametrize(("operation", "options"), SCHEMES.values(), ids=SCHEMES)
def test_terms_add_up_to_the_expected_time(operation: str, options: dict[str, Any]) -> None:
    split = 0
    for (n, k), m in itertools.product(SIZES, (1, 16, 64, 100, 256, 1000, 4096)):
        problem = {"m": m, "n": n, "k": k, **options}
        parts = kernels(epiloq.explain(operation, **problem, terms=True))
        assert len(parts) == 2 and parts[0][0] == epiloq.explain(operation, **problem)
        with epiloq.config(arch="sm90"):
            expected = dict(getattr(_core, f"candidates_{operation}")(-1, **problem)[2])
        chosen, runner_up = (check_sum(name, lines, k, expected) for name, lines in parts)
        # Tiles are compared without the delay, and with it whether to split K.
        delays = 0.8
        assert chosen <= runner_up + delays + 2 * HALF[2]
        split += ", K over clusters of 2" in parts[0][0]
    assert split > 0


def test_kernels_without_a_cost_model_say_so() -> None:
    for options in ({"arch": "sm80"}, {"arch": "sm75"}, {"aligned": False}, {"batches": 4}):
        operation = "scaled_bmm" if "batches" in options else "scaled_mm"
        terms = epiloq.explain(operation, m=64, n=4096, k=4096, terms=True, **options)
        assert terms.splitlines()[1] == "  no cost model: chosen by M and N (scaled_mm/rules.h)"
        assert terms.startswith("chosen: " + epiloq.explain(operation, m=64, n=4096, k=4096, **options))
