"""Tokens quantised by the kernel of a norm or a gated activation, as input of the next layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Int8Linear, W4A8Linear
from epiloq.nn.base.prepared_linear import FP8_BLOCK, HALF_DTYPES, K_MULTIPLE
from epiloq.nn.w4a8_linear import ACTIVATIONS

_TOKENS: dict[str, Any] = {"granularity": "token", "pad_to": K_MULTIPLE}


class Quantized(NamedTuple):
    """Tokens ``[M, K padded]`` and their scales, as described by `quantizer_of` for a layer."""

    q: Tensor
    scale: Tensor
    leading: torch.Size
    """Dimensions of the tokens before K."""
    dtype: torch.dtype
    """Of the product."""


def quantizer_of(layer: nn.Module) -> dict[str, Any] | None:
    """Options with which ``rms_norm_quant`` and ``silu_and_mul_quant`` quantise as `layer` does.

    None if the layer quantises in a way that they do not support, or does not quantise.
    """
    if isinstance(layer, Int8Linear) and layer.activation == "dynamic" and layer.symmetric:
        return {"dtype": torch.int8, **_TOKENS}
    if isinstance(layer, Fp8Linear) and layer.activation == "token":
        return {"dtype": torch.float8_e4m3fn, **_TOKENS}
    if isinstance(layer, W4A8Linear):
        return {"dtype": ACTIVATIONS[layer.activation], **_TOKENS}
    if isinstance(layer, Fp8BlockLinear):
        groups = {"granularity": "group", "group_size": FP8_BLOCK, "scale_layout": "column"}
        return {"dtype": torch.float8_e4m3fn, **_TOKENS, **groups}
    return None


def quantises(layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer with a result from `quantizer_of` quantises this input."""
    return not isinstance(layer, W4A8Linear) or layer.quantises(x)


def multiply(layer: Any, tokens: Quantized) -> Tensor:
    """``forward`` of a layer on quantised tokens: ``[…, out_features]`` of their dtype."""
    if isinstance(layer, W4A8Linear):
        return layer.multiply(tokens.q, tokens.scale, tokens.dtype).view(*tokens.leading, layer.out_features)
    weight, bias, weight_scale = layer._made[:3]
    widened = tokens.q.is_cuda and tokens.dtype not in HALF_DTYPES and not isinstance(layer, Fp8BlockLinear)
    out_dtype = torch.bfloat16 if widened else tokens.dtype
    bias = None if bias is None else bias.to(out_dtype)
    options: dict[str, Any] = {"out_dtype": out_dtype, "constant_b": True}
    if isinstance(layer, Fp8BlockLinear):
        y = epiloq.groupwise_mm(tokens.q, weight.t(), tokens.scale, weight_scale.t(), bias, **options)
    else:
        y = epiloq.scaled_mm(tokens.q, weight.t(), tokens.scale, weight_scale, bias, **options)
    y = y[:, : layer.out_features].contiguous().to(tokens.dtype)
    return y.view(*tokens.leading, layer.out_features)
