"""Product of FP8 weights and floating-point activations, used by several layers."""

from __future__ import annotations

import torch
from torch import Tensor

import epiloq
from epiloq.nn.base.dense_rows import dense_rows


def fp8_weight_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    block: tuple[int, int],
    padding: int,
    out_features: int,
) -> Tensor:
    """Product ``[…, out_features]`` with an FP8 weight, perhaps padded with zeros in both dimensions, by `padding`."""
    tokens = dense_rows(x.reshape(-1, x.shape[-1]))
    # Not from the weight's shape: torch.jit.load compares constants that a trace uses twice, and cannot compare FP8.
    if padding:
        tokens = torch.nn.functional.pad(tokens, (0, padding))
    bias = None if bias is None else bias.to(x.dtype)
    y = epiloq.fp8_weight_mm(tokens, weight, scale, bias, block=block)
    return y[:, :out_features].contiguous().view(*x.shape[:-1], out_features)
