"""Multiplication of a layer's input by a vector: AWQ scales of ModelOpt that cannot be folded into another layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq.nn.base.quantized_layer import convert_input
from epiloq.weights.computed import FLOAT_DTYPES

SCALE = "pre_quant_scale"
"""The name of the vector, ``[in_features]``, in layers and in files."""


def scaled_input(layer: Any, x: Tensor) -> Tensor:
    """``x * pre_quant_scale``, in float32 and rounded once to the dtype of `x`, which autocast may have cast.

    An input that the layer will refuse is returned unchanged, as is any if there is no scale.
    """
    scale = layer._stored(SCALE)
    if scale is None:
        return x
    x = convert_input(layer, x)
    if x.dim() == 0 or x.shape[-1] != layer.in_features or x.dtype not in FLOAT_DTYPES:
        return x
    if scale.device != x.device:
        kind = type(layer).__name__
        raise ValueError(f"epiloq.nn.{kind}: {SCALE}: expected a tensor on {x.device}, got one on {scale.device}")
    if scale.shape != (layer.in_features,):  # one element would be broadcast
        kind = type(layer).__name__
        raise ValueError(f"epiloq.nn.{kind}: {SCALE}: expected shape [{layer.in_features}], got {list(scale.shape)}")
    if torch.is_grad_enabled():
        layer._refuse_gradients()
    scaled: Tensor = (x.float() * scale).to(x.dtype)
    return scaled


def begin(layer: Any, in_features: int, device: torch.device | str | None) -> None:
    """Store a vector of ones as the scale."""
    layer._store(SCALE, torch.ones(in_features, dtype=torch.float32, device=device))
