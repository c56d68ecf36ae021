"""Float64 references of int8 layers, written from the documented formulas and without epiloq's operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from epiloq.nn import Int8Linear
from reference import ulp

KINDS = [("dynamic", True), ("dynamic", False), ("static", True), ("static", False)]


def make_linear(
    in_features: int, out_features: int, dtype: torch.dtype = torch.float32, bias: bool = True
) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    nn.init.normal_(linear.weight, std=in_features**-0.5)
    return linear


def input_parameters(x: Tensor, activation: str, symmetric: bool) -> tuple[Tensor, Tensor]:
    """(scale, zero point) by the documented formulas, per token or for all of x; float32 divisions, as documented."""
    x = x.float() if activation == "dynamic" else x.float().flatten().unsqueeze(0)
    if symmetric:
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(2.0**-126)
        return scale, torch.zeros_like(scale)
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    scale = ((high - low) / 255).clamp_min(2.0**-126)
    return scale, torch.round(-128 - low / scale)


def make_layer(linear: nn.Linear, x: Tensor, activation: str, symmetric: bool) -> Int8Linear:
    if activation == "dynamic":
        return Int8Linear.from_linear(linear, symmetric=symmetric)
    scale, zero = input_parameters(x, activation, symmetric)
    zero_point = None if symmetric else int(zero)
    return Int8Linear.from_linear(
        linear, activation="static", symmetric=symmetric, input_scale=scale, input_zero_point=zero_point
    )


def assert_within_one_ulp(d: Tensor, product: Tensor, bias: Tensor | None) -> None:
    """|d - (product + bias)| is at most one ulp of that sum in d's dtype, and a few float32 roundings of its terms.

    The float32 roundings show only where product and bias cancel; product is float64.
    """
    bias = torch.zeros((), dtype=torch.float64) if bias is None else bias.double().flatten()
    reference = product + bias
    bound = ulp(reference, d.dtype) + 2.0**-22 * (product.abs() + bias.abs())
    assert torch.all((d.double() - reference).abs() <= bound)


def assert_matches_float64(y: Tensor, linear: nn.Linear, x: Tensor, activation: str, symmetric: bool) -> None:
    """`y` is the layer's output by its documented formulas, the sums in float64."""
    weight = linear.weight.detach().float()
    weight_scale = (weight.abs().amax(1) / 127).clamp_min(2.0**-126)
    qw = torch.round(weight / weight_scale[:, None])
    scale, zero = input_parameters(x, activation, symmetric)
    qx = torch.clamp(torch.round(x.float() / scale) + zero, -128, 127)
    exact = (qx - zero).double() @ qw.double().t()
    product = scale.double() * weight_scale.double() * exact
    assert_within_one_ulp(y, product, None if linear.bias is None else linear.bias.detach())


def awkward_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Normal rows, zeros, constants, ties, one-sided ranges, tiny and huge values, NaN and infinities."""
    x = torch.randn(rows, columns)
    x[0] = 0
    x[1] = 3.25
    x[2] = torch.arange(columns) % 255 - 127 + 0.5
    x[3] = x[3].abs() + 2
    x[4] *= 1e-6
    x[5] *= 1e4
    x[6, columns // 2] = math.nan
    x[7, 0] = math.inf
    x[8, -1] = -math.inf
    x[9] = -1.5
    x[10] = torch.finfo(dtype).tiny / 4
    x[11] = 1000 + torch.rand(columns)
    x[12] = 1e4 + 8 * torch.rand(columns)
    return x.to(dtype)
