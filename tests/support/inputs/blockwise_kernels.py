"""The kernels of online_quant_mm, by what `explain` calls them, and sizes that reach them all."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import epiloq
from blockwise_reference import RawWeight
from epiloq import BlockQuantWeight, _core
from online_quant_sweep import TILES, Kernel
from reference import poisoned

ROWS = {"sm75": 6, "sm80": 8, "sm90": 13}
SIZES_M = (1, 7, 9, 16, 17, 32, 33, 64, 65, 100, 128, 200, 256, 300, 513, 2050)
SIZES_N = (16, 100, 2560, 2576, 4096, 4100, 8192, 8208, 16384)


def kernel(m: int, n: int, k: int, group: int, bits: int, arch: str, memory_gb_s: int = 0) -> str:
    card = {"arch": arch, "sm_count": 132, "memory_gb_s": memory_gb_s}
    return epiloq.explain("online_quant_mm", m=m, n=n, k=k, group_size=group, bits=bits, **card)


def tile(name: str) -> str:
    return name.split(", K ")[0]


def some(size: int, count: int) -> Tensor:
    """The first, the last and random indices below `size`."""
    return torch.cat((torch.tensor([0, size - 1]), torch.randint(size, (count,)))).unique()


def term_magnitude(x: Tensor, weight: RawWeight) -> Tensor:
    return x.double().abs() @ weight.prepared().dequantize(torch.float64).abs().t()


def arguments(
    x: Tensor,
    weight: BlockQuantWeight,
    out: Tensor,
    bias: Tensor | None = None,
    clamp: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[Any, ...]:
    """Those of the bound call."""
    parts = (out, x, weight.values, weight.parameters, bias)
    return (*parts, weight.in_features, weight.group_size, weight.bits, *clamp, False)


def run_kernel(kernel: Kernel, x: Tensor, weight: BlockQuantWeight, out: Tensor | None = None, **more: Any) -> Tensor:
    """By the kernel asked for."""
    out = poisoned((x.shape[0], weight.out_features), x.dtype, "cuda") if out is None else out
    _core.online_quant_mm(*arguments(x, weight, out, **more), kernel=kernel)
    return out


def wgmma_cases() -> list[tuple[Kernel, int, int, int]]:
    """Every tile of SM90's, and M, N, K: more tiles than SMs; K shared by clusters in odd, unequal parts; few tokens;
    one and three waves before a last one that pairs share.
    """
    return [
        (Kernel("sm90", row, *how), m, n, k)
        for row, tokens in enumerate(TILES["sm90"])
        for how, m, n, k in (
            ((1,), 2 * tokens + 20, 8200, 600),
            ((2,), tokens + 6, 300, 2300),
            ((3,), tokens, 2000, 8320),
            ((7,), 17, 260, 8320),
            ((2, True), 5 * tokens - 3, 4100, 600),
            ((2, True), 13 * tokens - 9, 4100, 1100),
        )
    ]
