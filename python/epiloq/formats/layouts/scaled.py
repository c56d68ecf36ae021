"""Layers whose files have a vector besides, by which inputs are multiplied first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from epiloq.formats import epiloq_modules
from epiloq.formats.layouts.base import FormatError, Quantization, require
from epiloq.formats.weights import ModuleWeight, ScaledWeight, Weight
from epiloq.nn.base.scaled_input import SCALE
from epiloq.weights.computed import FLOAT_DTYPES
from epiloq.weights.grid import QuantizedWeight

OPTION = "scaled_input"
"""Option of the constructor of modules that run such weights."""


def without_scale(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's other tensors, and the vector ``[K]``. Raises FormatError for one of another shape or type, and for
    values that are not finite.
    """
    rest = {name: tensor for name, tensor in tensors.items() if name != SCALE}
    require({SCALE: tensors[SCALE]}, {SCALE: (None, (shape[1],))})
    scale = tensors[SCALE]
    if scale.dtype not in FLOAT_DTYPES:
        raise FormatError(f"{SCALE}: expected floating point of 16 or 32 bits, got {scale.dtype}")
    if not scale.is_meta and not bool(scale.isfinite().all()):
        raise FormatError(f"{SCALE}: expected finite numbers, got {scale[~scale.isfinite()][0].item()}")
    return rest, scale


def of(inner: Weight, quantization: Quantization | None, scale: Tensor) -> ScaledWeight:
    """The weight of such a layer, given the one that it would have without the vector."""
    if not isinstance(inner, (ModuleWeight, QuantizedWeight)):
        raise FormatError(f"{SCALE}: no layer of FP8 blocks scales its inputs by channel first")
    module, options = epiloq_modules.described(inner, quantization)
    state = epiloq_modules.state_of(inner, quantization) | {SCALE: scale}

    def values() -> Tensor:
        return inner.dequantize() * scale.to(torch.float32)

    return ScaledWeight(module, {**options, OPTION: True}, state, values, inner, scale, columns=scale.shape[0])
