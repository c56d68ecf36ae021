"""Batches of int8 and float8 products in float64, and the bound that they keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from float8_reference import ACCURATE
from reference import ulp

INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
KINDS = [(INT8, INT8), (E4M3, E4M3), (E4M3, E5M2)]


@dataclass
class Problem:
    """Attention's products: scores, or scores times values transposed."""

    a: Tensor  # [B, M, K]
    weight: Tensor  # [B, N, K]
    scale_a: Tensor
    scale_b: Tensor

    @property
    def b(self) -> Tensor:
        return self.weight.transpose(1, 2)


def values(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=INT8) if dtype == INT8 else (torch.randn(*shape) * 64).to(dtype)


def make(
    batches: int,
    m: int,
    n: int,
    k: int,
    *,
    kind: tuple[torch.dtype, torch.dtype] = KINDS[0],
    scales: str = "rows",
    device: str = "cpu",
) -> Problem:
    """scales: "one", "product" (one each) or "rows" (of a, and columns of b)."""
    shapes = {"one": ((1,), (1,)), "product": ((batches, 1, 1),) * 2, "rows": ((batches, m, 1), (batches, 1, n))}
    scale_a, scale_b = (torch.rand(shape) * 0.02 + 1e-3 for shape in shapes[scales])
    parts = (values(batches, m, k, dtype=kind[0]), values(batches, n, k, dtype=kind[1]), scale_a, scale_b)
    return Problem(*(part.to(device) for part in parts))


def exact(p: Problem) -> tuple[Tensor, Tensor]:
    """In float64, and the root of the sum of squared terms."""
    a, b = p.a.double(), p.b.double()
    scale = p.scale_a.double() * p.scale_b.double()
    return scale * (a @ b), scale * (a.square() @ b.square()).sqrt()


def assert_close(out: Tensor, p: Problem) -> None:
    reference, span = exact(p)
    error = (out.double() - reference).abs()
    assert not error.isnan().any(), "NaN: an element that was never written?"
    inner = 2.0**-22 * reference.abs() if p.a.dtype == INT8 else ACCURATE * span
    assert (error <= ulp(reference, out.dtype) + inner).all()


def defined_int8(p: Problem, scale_out: Tensor) -> Tensor:
    """What the docstring says, in the float32 steps of docs/numerics.md."""
    sums = (p.a.double() @ p.b.double()).float()  # int32 sums, rounded once
    return torch.clamp(torch.round(p.scale_a * (p.scale_b * sums) / scale_out), -128, 127).to(INT8)
