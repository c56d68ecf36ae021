"""Which kernel serves online_quant_mm, as `explain` tells it without a GPU."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest
import torch

import epiloq
from blockwise_kernels import ROWS, SIZES_M, SIZES_N, kernel, tile
from blockwise_reference import make_weight
from online_quant_sweep import name_of
from sweeps import measured


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("arch", ["sm75", "sm80"])
def test_every_row_is_reached(arch: str, bits: int) -> None:
    kernels = {tile(kernel(m, n, 4096, 128, bits, arch)) for m, n in itertools.product(SIZES_M, SIZES_N)}
    assert len(kernels) == ROWS[arch], sorted(kernels)
    assert all(name.startswith(f"{arch} mma.sync w{bits}a8") for name in kernels)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_row_of_wgmma_is_reached_and_most_of_the_others(bits: int) -> None:
    """By times, which may give a tile to SM80 alone."""
    sizes = list(itertools.product(SIZES_M, SIZES_N, (576, 4096, 14336)))
    names = {group: {tile(kernel(m, n, k, group, bits, "sm90")) for m, n, k in sizes} for group in (32, 64, 128)}
    assert len({name for name in names[128] if name.startswith(f"sm90 wgmma w{bits}a8")}) == 5
    assert len({name.split("blocks")[1][4:] for name in set.union(*names.values()) if "mma.sync" in name}) >= 6
    assert not any("wgmma" in name for group in (32, 64) for name in names[group])


@pytest.mark.parametrize("bits", [4, 8])
def test_split_k_is_used_for_few_tiles(bits: int) -> None:
    shapes = list(itertools.product(SIZES_M, SIZES_N, (4096, 16384)))
    names = {(m, n, k): kernel(m, n, k, 128, bits, "sm90") for m, n, k in shapes}
    shared = {shape for shape, name in names.items() if "K over clusters" in name}
    assert (100, 4096, 4096) in shared and (2050, 16384, 4096) not in shared
    assert any("K of the last wave over" in name for name in names.values())
    assert {tile(names[shape]) for shape in shared} == {tile(name) for name in names.values() if "wgmma" in name}


def test_smaller_blocks_are_near_the_fastest_by_the_times_of_128() -> None:
    """The bounds are what was found: nothing was fitted to these."""
    behind = []
    for row in measured("online_quant_small_blocks_h100"):
        chosen = name_of(kernel(row["m"], row["n"], row["k"], row["group"], row["bits"], "sm90"))
        behind.append(row["us"][chosen] / min(row["us"].values()))
    assert len(behind) == 64 and fmean(behind) <= 1.0085 and max(behind) <= 1.09


def test_empty_problems_launch_nothing() -> None:
    for m, n, k in ((0, 4096, 4096), (64, 0, 4096), (0, 0, 1)):
        assert kernel(m, n, k, 128, 8, "sm90") == "nothing to launch: the output is empty"
    assert "blocks of 128" in kernel(2**31 - 1, 2**20 - 16, 2**30, 128, 4, "sm90")


def test_the_rate_of_memory_counts() -> None:
    """8-bit weights at small M wait for it; large products do not."""
    few, many = (
        [kernel(m, n, 4096, 128, 8, "sm90", rate) for rate in (1000, 8000)] for m, n in ((64, 8192), (4096, 4096))
    )
    assert few[0] != few[1] and many[0] == many[1]


def test_problems_without_fused_kernel_are_staged() -> None:
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
