"""float8 products in float64, and the bound that sums of limited precision keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference import MANTISSA_BITS, ulp

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Float8Problem:
    a: Tensor
    weight: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None

    @property
    def b(self) -> Tensor:
        return self.weight.t()


def make_float8_problem(
    m: int,
    n: int,
    k: int,
    *,
    device: str = "cpu",
    operands: tuple[torch.dtype, torch.dtype] = (torch.float8_e4m3fn, torch.float8_e4m3fn),
    dtype: torch.dtype = torch.bfloat16,
    per_token: bool = True,
    per_channel: bool = True,
    bias: bool = False,
) -> Float8Problem:
    """Normal values over much of the type's range, as quantised layers have."""
    a = (torch.randn(m, k, device=device) * 64).to(operands[0])
    weight = (torch.randn(n, k, device=device) * 64).to(operands[1])
    scale_a = torch.rand(m, 1) * 0.02 + 1e-3 if per_token else torch.rand(1) * 0.02 + 1e-3
    scale_b = torch.rand(n) * 0.02 + 1e-3 if per_channel else torch.rand(1) * 0.02 + 1e-3
    row_bias = torch.randn(n).to(dtype) if bias else None
    parts = (a, weight, scale_a, scale_b, row_bias)
    return Float8Problem(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]


def exact_float8(p: Float8Problem) -> tuple[Tensor, Tensor]:
    """The product in float64, and the root of the sum of its squared terms, scaled: what a random walk of them spans.

    In single rows of the operands' device, for speed where that is a GPU.
    """
    a, b = p.a.double(), p.weight.double().t()
    scale = p.scale_a.double().reshape(-1, 1) * p.scale_b.double().reshape(1, -1)
    bias = 0 if p.bias is None else p.bias.double()
    return scale * (a @ b) + bias, scale * (a.square() @ b.square()).sqrt()


# Tensor cores keep about 14 bits of a sum. Added up in fp32 every 128 or 256 of K, the errors are a random walk of that
# size, a part of the terms' span that does not grow with K: 2^-12 on average on an H200, 2^-8.8 for the worst of 8
# million elements. Left to the tensor cores over all of K, it does: the worst were 2^-6.1 at 2048, 2^-3.1 at 65,536.
ACCURATE = 2.0**-8


def fast_bound(k: int) -> float:
    return 2.0**-10.5 * k**0.5


def assert_float8_close(out: Tensor, p: Float8Problem, span_bound: float = ACCURATE) -> None:
    """Within one ulp of the output and `span_bound` times the terms' span, element by element, of float64."""
    reference, span = exact_float8(p)
    assert out.dtype in MANTISSA_BITS
    error = (out.double().reshape(reference.shape) - reference).abs()
    assert not error.isnan().any(), "NaN: an element that was never written?"
    limit = ulp(reference, out.dtype) + span_bound * span
    worst = (error / limit.clamp(min=1e-300)).max() if error.numel() else torch.zeros(())
    assert (error <= limit).all(), f"worst element {float(worst):.2f} times the bound"
