"""Product of FP8 weights and floating-point activations, used by several layers."""

from __future__ import annotations

import torch
from torch import Tensor

import epiloq
from epiloq.nn.base.dense_rows import dense_rows


def fp8_weight_product(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, block: tuple[int, int], out_features: int
) -> Tensor:
    """Product ``[…, out_features]`` with an FP8 weight that may be zero-padded along both dimensions."""
    columns = x.shape[-1]
    tokens = dense_rows(x.reshape(-1, columns))
    if weight.shape[1] > columns:
        tokens = torch.nn.functional.pad(tokens, (0, weight.shape[1] - columns))
    bias = None if bias is None else bias.to(x.dtype)
    y = epiloq.fp8_weight_mm(tokens, weight, scale, bias, block=block)
    return y[:, :out_features].contiguous().view(*x.shape[:-1], out_features)
