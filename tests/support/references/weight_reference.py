"""Low-bit weights with their meaning in float64, written from the documented formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import epiloq
from epiloq import _core
from reference import poisoned, ulp

# Tokens of a tile, by row of kWgmmaRows in src/dispatch/weight_only_mm/tables.h, and the rows that round weights with
# their scales, which must be of x's dtype.
WGMMA_TOKENS = (32,) * 4 + (64,) * 4 + (128,) * 3 + (256,)
WGMMA_ROUNDS = (10, 11)
# Likewise, of kDecodeRows.
DECODE_TOKENS = (8,) * 3 + (16,) * 4
KINDS = ("symmetric", "zero", "offset")
# One part in so many is the rounding of a dense product's weights.
PRECISION = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


@dataclass
class Weight:
    """Random integers and parameters, packed, and ``dense`` [N, K] in float64; ``size`` of the terms that make it."""

    q: Tensor
    scale: Tensor
    zero: Tensor | None
    offset: Tensor | None
    perm: Tensor | None
    packed: epiloq.PackedWeight
    dense: Tensor
    size: Tensor


def make_weight(
    n: int,
    k: int,
    bits: int = 4,
    group_size: int = 128,
    kind: str = "symmetric",
    *,
    scale_dtype: torch.dtype = torch.float16,
    act_order: bool = False,
    device: str = "cpu",
) -> Weight:
    groups = 1 if group_size == -1 else -(-k // group_size)
    low = -(2 ** (bits - 1)) if kind == "symmetric" else 0
    q = torch.randint(low, low + 2**bits, (n, k), device=device)
    scale = (torch.rand(n, groups, device=device) * 0.02 + 1e-3).to(scale_dtype)
    zero = torch.randint(0, 2**bits, (n, groups), device=device) if kind == "zero" else None
    offset = torch.randn(n, groups, device=device).mul_(0.05).to(scale_dtype) if kind == "offset" else None
    perm = torch.randperm(k, device=device) if act_order else None
    packed = epiloq.pack_weight(q, scale, zero, offset, bits=bits, group_size=group_size, perm=perm)
    group = torch.arange(k, device=device) // (max(k, 1) if group_size == -1 else group_size)
    z = 0 if zero is None else zero[:, group]
    o = torch.zeros(n, k, device=device).double() if offset is None else offset[:, group].double()
    product = scale[:, group].double() * (q - z)
    features = torch.arange(k, device=device) if perm is None else perm
    dense, size = torch.empty_like(product), torch.empty_like(product)
    dense[:, features], size[:, features] = product + o, product.abs() + o.abs()
    return Weight(q, scale, zero, offset, perm, packed, dense, size)


def run_kernel(
    kernel: tuple[str, int, int],
    x: Tensor,
    weight: epiloq.PackedWeight,
    bias: Tensor | None = None,
    clamp: tuple[float, float] = (-math.inf, math.inf),
    out: Tensor | None = None,
) -> Tensor:
    """One kernel (family, row, CTAs that split K), whatever the tables choose.

    Raises ValueError where it does not support the problem.
    """
    if out is None:
        out = poisoned((x.shape[0], weight.n), x.dtype, str(x.device))
    w = weight
    numbers = (w.bits, w.n, w.k, w.group_size, *clamp)
    assert _core.weight_only_mm(out, x, w.q, w.scale, w.zero, w.offset, bias, *numbers, kernel=kernel)
    return out


def rounds_weights(kernel: tuple[str, int, int]) -> bool:
    return kernel[0] == "wgmma" and kernel[1] in WGMMA_ROUNDS


def assert_close(
    y: Tensor,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    *,
    rounded_weights: bool = False,
) -> None:
    """The documented bound: one ulp of the output, fp32's rounding of a sum, and of weights where they are rounded."""
    rows = x.double().reshape(-1, x.shape[-1])
    exact = rows @ weight.dense.t()
    size = rows.abs() @ weight.size.t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    if clamp is not None:
        exact = exact.clamp(*clamp)
    bound = ulp(exact, y.dtype) + 2.0**-23 * x.shape[-1] ** 0.5 * size
    if rounded_weights:
        # Products below fp16's normal numbers are rounded to 2^-24.
        bound += PRECISION[y.dtype] * size + 2.0**-25 * rows.abs().sum(-1, keepdim=True)
    error = (y.double().reshape(exact.shape) - exact).abs()
    assert not error.isnan().any(), "NaN: an element that was never written?"
    assert (error <= bound).all(), f"worst element {float((error / bound).max()):.2f} times the bound"


def run_and_assert_close(
    device: str,
    m: int,
    n: int,
    k: int,
    bits: int = 4,
    group_size: int = 128,
    kind: str = "symmetric",
    dtype: torch.dtype = torch.bfloat16,
    *,
    scale_dtype: torch.dtype = torch.float16,
    act_order: bool = False,
    bias: bool = False,
    clamp: tuple[float, float] | None = None,
) -> None:
    weight = make_weight(n, k, bits, group_size, kind, scale_dtype=scale_dtype, act_order=act_order, device=device)
    x = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(n, device=device).to(dtype) if bias else None
    out = poisoned((m, n), dtype, device)
    assert epiloq.weight_only_mm(x, weight.packed, b, clamp=clamp, out=out) is out
    kernel = epiloq.explain("weight_only_mm", x, weight.packed, b)
    rounded = "dequantise," in kernel or "rounded" in kernel
    assert_close(out, x, weight, b, clamp, rounded_weights=rounded)
    assert torch.equal(epiloq.weight_only_mm(x, weight.packed, b, clamp=clamp), out)
