"""Which kernel weight_only_mm chooses on SM90, against times measured on an H100 and an H200.

The bounds are what the fit of the cost model left. They tell when a changed kernel or cost no longer fits, not how good
a choice is.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import geometric_mean
from typing import Any

import pytest
import torch

import epiloq
from cost_fit import name_in_sweep
from epiloq import _core
from sweeps import measured

# GB/s: the product of the memory's clock and width.
H200, H100 = 4917, 3352
CARDS = {"h100": H100, "h200": H200}


def chosen_over_fastest(row: dict[str, Any], memory_gb_s: int) -> float | None:
    """Time of the chosen kernel over the fastest one's; None for a dense product, which is in no sweep."""
    problem = {key: row[key] for key in ("bits", "n", "k", "m")}
    explained = epiloq.explain("weight_only_mm", **problem, group_size=128, arch="sm90", memory_gb_s=memory_gb_s)
    if explained.startswith("dequantise"):
        return None
    chosen = name_in_sweep(explained)
    # The file holds the kernels within 15 % of the fastest.
    assert chosen in row["us"], (explained, row)
    return float(row["us"][chosen] / min(row["us"].values()))


@pytest.mark.parametrize("card", CARDS)
def test_the_choice_is_near_the_fastest_that_was_measured(card: str) -> None:
    ratios = defaultdict(list)
    for row in measured(f"weight_only_{card}"):
        if ratio := chosen_over_fastest(row, CARDS[card]):
            assert ratio <= 1.1, row
            ratios[row["bits"], row["m"]].append(ratio)
    assert sum(map(len, ratios.values())) == {"h100": 217, "h200": 108}[card]
    for (bits, m), some in ratios.items():
        assert geometric_mean(some) <= 1.05, (bits, m, some)
    assert geometric_mean([ratio for some in ratios.values() for ratio in some]) <= 1.011


def test_the_rate_of_memory_counts() -> None:
    problems = [{"m": m, "n": n, "k": k} for m in (3, 8, 16, 32) for n in (2112, 4096, 8192) for k in (4096, 14336)]

    def choices(memory_gb_s: int) -> list[str]:
        return [epiloq.explain("weight_only_mm", **problem, memory_gb_s=memory_gb_s) for problem in problems]

    assert choices(H200) != choices(H100) == choices(0)


def packed_zeros(n: int, k: int) -> epiloq.PackedWeight:
    scale = torch.ones(n, k // 128, dtype=torch.bfloat16)
    return epiloq.pack_weight(torch.zeros(n, k, dtype=torch.int8), scale, bits=4, group_size=128)


@pytest.mark.gpu
def test_supports_depends_on_the_device() -> None:
    properties = _core.device_properties(0)
    assert 100 < properties["memory_gb_s"] < 20000
    if properties["compute_capability"] != 90:
        pytest.skip("one architecture's kernels, on itself")
    device = {"arch": "sm90", **{name: properties[name] for name in ("sm_count", "memory_gb_s")}}
    for n, k in ((2112, 7168), (4096, 14336)):
        weight = packed_zeros(n, k).to("cuda")
        for m in (1, 3, 8, 16, 32, 64):
            x = torch.zeros(m, k, dtype=torch.bfloat16, device="cuda")
            expected = epiloq.explain("weight_only_mm", m=m, n=n, k=k, group_size=128, **device)
            assert epiloq.explain("weight_only_mm", x, weight) == expected


@pytest.mark.parametrize("memory_gb_s", [4700, 4814, H200, H100])
def test_measured_layers_are_those_of_cards_with_about_that_memory(memory_gb_s: int) -> None:
    """H200s report rates that differ by a few percent; an H100 has rows of its own."""
    kernel = epiloq.explain("weight_only_mm", m=24, n=8192, k=8192, arch="sm90", memory_gb_s=memory_gb_s, terms=True)
    assert ("chosen as measured" in kernel) == (memory_gb_s != H100), kernel
