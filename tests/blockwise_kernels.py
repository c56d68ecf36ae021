"""The kernels of online_quant_mm, by what `explain` calls them, and sizes that reach them all."""

from __future__ import annotations

import torch
from torch import Tensor

import epiloq
from blockwise_reference import RawWeight

ROWS = {"sm75": 6, "sm80": 8, "sm90": 13}
SIZES_M = (1, 7, 9, 16, 17, 32, 33, 64, 65, 100, 128, 200, 256, 300, 513, 2050)
SIZES_N = (16, 100, 2560, 2576, 4096, 4100, 8192, 8208, 16384)


def kernel(m: int, n: int, k: int, group: int, bits: int, arch: str) -> str:
    return epiloq.explain("online_quant_mm", m=m, n=n, k=k, group_size=group, bits=bits, arch=arch, sm_count=132)


def tile(name: str) -> str:
    return name.split(", K ")[0]


def some(size: int, count: int) -> Tensor:
    """The first, the last and random indices below `size`."""
    return torch.cat((torch.tensor([0, size - 1]), torch.randint(size, (count,)))).unique()


def term_magnitude(x: Tensor, weight: RawWeight) -> Tensor:
    return x.double().abs() @ weight.prepared().dequantize(torch.float64).abs().t()
