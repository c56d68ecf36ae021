"""What the tests of epiloq.compat's FP8 functions share: operands, and formulas written out."""

from __future__ import annotations

import torch
from torch import Tensor

from float8_reference import ACCURATE
from reference import ulp

HALF = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALF]
E4M3 = torch.float8_e4m3fn


def fp8(*shape: int) -> Tensor:
    return (torch.randn(shape) * 64).to(E4M3)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.02 + 1e-3


def spread(scale: Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> Tensor:
    """Scales of blocks as one of each element, float64."""
    wide = scale.double().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : shape[-2], : shape[-1]]


def assert_product(d: Tensor, a: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """`d` is ``a @ w.mT + bias`` of dequantised float64 operands, up to its own rounding and sums in fp32, whose own
    add up as the root of their number: of 384 terms one in 5,100 sums was off by 1.25 * 2^-18 of their span."""
    on_cpu = 2.0**-18 * max(1.0, (a.shape[-1] / 128) ** 0.5)
    span_bound, d = on_cpu if d.device.type == "cpu" else ACCURATE, d.cpu()
    bias = torch.zeros(()) if bias is None else bias
    reference = a @ w.mT + bias.double().flatten()
    span = (a.square() @ w.mT.square()).sqrt()
    error = (d.double() - reference).abs()
    assert not error.isnan().any()
    assert (error <= ulp(reference, d.dtype) + span_bound * span + 2.0**-22 * bias.double().abs().max()).all()


def codes(q: Tensor) -> Tensor:
    return q.contiguous().view(torch.uint8)


def assert_quantised(x: Tensor, q: Tensor, scale: Tensor, expected: Tensor) -> None:
    """`scale` is as expected, and q the nearest code of each element over its own; `expected` spreads over x."""
    assert torch.equal(scale, expected)
    groups = -(-x.shape[-1] // expected.shape[-1])
    wide = expected.repeat_interleave(groups, -1)[..., : x.shape[-1]]
    assert torch.equal(codes(q), codes((x.float() / wide).clamp(-448, 448).to(E4M3)))


def power_of_two(scale: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
