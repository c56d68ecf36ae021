"""What the tests compare with: definitions in float64, written without a look at the implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}


@dataclass
class Problem:
    """Random operands of a scaled product; `args(...)` in the order of the call."""

    a: Tensor
    weight: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None
    azp: Tensor | None
    azp_adj: Tensor | None

    @property
    def b(self) -> Tensor:
        return self.weight.t()


def make_problem(
    m: int,
    n: int,
    k: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    per_token: bool = True,
    per_channel: bool = True,
    bias: bool = False,
    zero_point: str = "none",
) -> Problem:
    """zero_point: "none", "static" (multiplied into azp_adj) or "token"."""
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
    scale_a = torch.rand(m, 1) * 0.02 + 1e-3 if per_token else torch.rand(1) * 0.02 + 1e-3
    scale_b = torch.rand(n) * 0.02 + 1e-3 if per_channel else torch.rand(1) * 0.02 + 1e-3
    row_bias = torch.randn(n).to(dtype) if bias else None
    azp = azp_adj = None
    if zero_point != "none":
        azp_adj = weight.sum(1, dtype=torch.int32)
        azp = torch.randint(-128, 128, (m, 1), dtype=torch.int32, device=device)
        if zero_point == "static":
            azp_adj = azp_adj * 17
            azp = None
    parts = (a, weight, scale_a, scale_b, row_bias, azp, azp_adj)
    return Problem(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]


def exact(p: Problem) -> tuple[Tensor, Tensor]:
    """The product in float64, and the magnitude that fp32 rounding scales with.

    Where the operands are, for speed where that is a GPU: sums of integers are exact on any.
    """
    acc = p.a.double() @ p.weight.double().t()
    if p.azp_adj is not None:
        azp = 1.0 if p.azp is None else p.azp.double().reshape(-1, 1)
        acc = acc - azp * p.azp_adj.double()
    scaled = p.scale_a.double().reshape(-1, 1) * p.scale_b.double().reshape(1, -1) * acc
    bias = torch.zeros_like(scaled[:1]) if p.bias is None else p.bias.double()
    return scaled + bias, scaled.abs() + bias.abs()


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` around float64 values."""
    smallest = torch.finfo(dtype).smallest_normal
    exponent = torch.floor(torch.log2(x.abs().clamp(min=smallest)))
    return torch.exp2(exponent - MANTISSA_BITS[dtype])


def assert_within_one_ulp(out: Tensor, p: Problem) -> None:
    """Each element within one unit in the last place of float64; fp32 rounding of the terms is allowed for."""
    reference, magnitude = exact(p)
    assert out.dtype in MANTISSA_BITS
    error = (out.double().reshape(reference.shape) - reference).abs()
    limit = ulp(reference, out.dtype) + 2.0**-22 * magnitude
    worst = (error / limit).max() if error.numel() else torch.zeros(())
    assert not error.isnan().any(), "NaN: an element that was never written?"
    assert (error <= limit).all(), f"worst element {float(worst):.2f} times the bound"


def typical_error(found: Tensor, expected: Tensor) -> float:
    """Of values ``[…, tokens, features]``, the median over tokens of the relative error.

    For what a rare token differs in: a value beside a tie that rounds the other way, another choice of experts.
    """
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """An output that shows what was not written."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_rounded_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x W^T + bias within the roundings of the weights to x's dtype, of sums in fp32 and of the result."""
    of_bias = 0 if bias is None else bias.double()
    exact, size = x.double() @ weight.t() + of_bias, x.double().abs() @ weight.abs().t()
    eps = torch.finfo(x.dtype).eps
    bound = size * (eps / 2 + 2.0**-16) + (exact.abs() + size * eps) * eps / 2 + torch.finfo(x.dtype).tiny
    assert found.shape == exact.shape and found.dtype == x.dtype
    assert ((found.double() - exact).abs() <= bound).all()
