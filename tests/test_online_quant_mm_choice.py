"""Which kernel serves online_quant_mm, as `explain` tells it without a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import fmean

import pytest
import torch

import epiloq
from blockwise_kernels import ROWS, SIZES_M, SIZES_N, kernel, tile
from blockwise_reference import make_weight
from sweeps import sweep

RESULTS = Path(__file__).parents[1] / "benchmarks/results"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("arch", ROWS)
def test_every_row_is_reached(arch: str, bits: int) -> None:
    kernels = {tile(kernel(m, n, 4096, 128, bits, arch)) for m, n in itertools.product(SIZES_M, SIZES_N)}
    kernels |= {
        kernel(m, n, 4096, 64, bits, arch).replace("of 64", "of 128") for m, n in itertools.product(SIZES_M, SIZES_N)
    }
    assert len(kernels) == ROWS[arch], sorted(kernels)
    families = {"sm75": ("sm75 mma.sync",), "sm80": ("sm80 mma.sync",)}.get(arch, ("sm80 mma.sync", "sm90 wgmma"))
    assert all(name.startswith(tuple(f"{family} w{bits}a8" for family in families)) for name in kernels)


@pytest.mark.parametrize("bits", [4, 8])
def test_few_tiles_share_k_and_many_do_not(bits: int) -> None:
    shapes = list(itertools.product(SIZES_M, SIZES_N, (4096, 16384)))
    names = {(m, n, k): kernel(m, n, k, 128, bits, "sm90") for m, n, k in shapes}
    shared = {shape for shape, name in names.items() if "K over clusters" in name}
    assert (64, 4096, 4096) in shared and (2050, 16384, 4096) not in shared
    assert any("K of the last wave over" in name for name in names.values())
    assert {tile(names[shape]) for shape in shared} == {tile(name) for name in names.values() if "wgmma" in name}


@pytest.mark.parametrize(
    ("card", "timed", "mean", "most"), [("nvidia-h200", 235, 1.003, 1.085), ("nvidia-h100", 394, 1.007, 1.13)]
)
def test_the_choice_is_near_the_fastest_that_was_measured(card: str, timed: int, mean: float, most: float) -> None:
    """The bounds are what the fit left: they say when a row or a time that is changed no longer fits. An H200 has not
    been seen with a last wave that is shared, or with tiles of 80 tokens as they are now."""
    behind = []
    for row in sweep(RESULTS / card / "2026-11-26-online-quant-few-sweep.json"):
        name = kernel(row["m"], row["n"], row["k"], 128, row["bits"], "sm90").split("blocks of 128 ")[1]
        if name in row["us"]:
            behind.append(row["us"][name] / min(row["us"].values()))
            assert behind[-1] <= most, (name, row)
    assert len(behind) == timed and fmean(behind) <= mean, fmean(behind)


def test_what_has_no_fused_kernel_is_staged_and_says_so() -> None:
    for arch in ROWS:
        assert kernel(64, 64, 64, 48, 8, arch).startswith("staged")
        assert not any(kernel(64, 64, 64, group, 8, arch).startswith("staged") for group in (32, 64, 128))
    with pytest.raises(ValueError, match="arch"):
        epiloq.explain("online_quant_mm", m=1, n=1, k=1, arch="sm91")


def test_explain_takes_the_calls_own_arguments(seed: int) -> None:
    x, weight = torch.randn(3, 100), make_weight(24, 100, 32)
    for arguments in ((x, weight.prepared()), (x, weight.q, weight.scale, weight.offset)):
        group = {} if len(arguments) == 2 else {"group_size": 32}
        assert epiloq.explain("online_quant_mm", *arguments, **group).startswith("cpu")
        for arch in ("sm75", "sm80"):
            with epiloq.config(arch=arch):
                answer = epiloq.explain("online_quant_mm", *arguments, **group)
                assert answer.startswith(f"{arch} mma.sync w8a8 blocks of 32")
                assert epiloq.explain("online_quant_mm", *arguments, **group, staged=True).startswith("staged")
                assert epiloq.supports("online_quant_mm", *arguments, **group) == (True, answer)
    assert epiloq.supports("online_quant_mm", x) == (
        False,
        "epiloq.online_quant_mm: missing a required argument: 'w_q'",
    )
