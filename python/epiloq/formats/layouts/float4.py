"""The layouts of FP4 layers in compressed-tensors: ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``.

Defined by its compressors (``compressed_tensors/compressors/{nvfp4,mxfp4}``): two codes to a byte along K, the even
column in the low half; ``weight_global_scale`` is the reciprocal of the factor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import epiloq
from epiloq.formats.description import FP4_OF_BLOCKS, Description
from epiloq.formats.layouts.base import Expected, FormatError, divides, require
from epiloq.formats.weights import ModuleWeight, Weight
from epiloq.weights.fp4 import FORMATS, Fp4Format

_NAME = "compressed-tensors"
_GLOBAL, _OF_INPUTS = "weight_global_scale", "input_global_scale"


def _format(described: Description) -> Fp4Format:
    return FORMATS[FP4_OF_BLOCKS[described.group_size]]


def parts(described: Description) -> frozenset[str]:
    """Every tensor that a layer may have, by the last part of its name, beside its bias."""
    whole = {_GLOBAL} if _format(described).has_global_scale else set()
    # Of activations that the files would have in FP4, which stay as they are.
    inputs = {_OF_INPUTS} if described.inputs is not None else set()
    return frozenset({"weight_packed", "weight_scale", *whole, *inputs})


def checked(tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int]) -> dict[str, Tensor]:
    """A layer's tensors but for those of activations. Raises FormatError for other types and shapes."""
    chosen, (rows, columns) = _format(described), shape
    found = {name: t.reshape(1) if t.ndim == 0 else t for name, t in tensors.items() if name != _OF_INPUTS}
    whole: Expected = {_GLOBAL: (torch.float32, (1,))} if chosen.has_global_scale else {}
    expected: Expected = {
        "weight_packed": (torch.uint8, (rows, -(-columns // 2))),
        "weight_scale": (chosen.scale_dtype, (rows, -(-columns // chosen.block_size))),
        **whole,
    }
    require(found, expected)
    return found


def from_tensors(tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int]) -> ModuleWeight:
    """What a layer's tensors stand for. Raises FormatError for tensors that disagree with it."""
    found = checked(tensors, described, shape)
    codes, scale, divisor = found["weight_packed"], found["weight_scale"], found.get(_GLOBAL)
    if divisor is not None and not bool(0 < divisor < torch.inf):
        raise FormatError(f"{_GLOBAL}: expected a positive number, got {divisor.item()}")
    state = {"weight": codes, "weight_scale": scale} | ({} if divisor is None else {_GLOBAL: divisor})

    def values() -> Tensor:
        factor = None if divisor is None else divisor.reciprocal()
        return epiloq.fp4_dequantize(codes.contiguous(), scale.contiguous(), in_features=shape[1], global_scale=factor)

    return ModuleWeight("Fp4Linear", {"format": _format(described).name}, state, values, columns=shape[1])


def to_tensors(weight: Weight, described: Description, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inverse of `from_tensors`. Raises FormatError for another kind of weight, and for a short last block."""
    chosen = _format(described)
    if not isinstance(weight, ModuleWeight) or (weight.module, weight.options.get("format")) != (
        "Fp4Linear",
        chosen.name,
    ):
        said = weight.described if isinstance(weight, ModuleWeight) else "other numbers than FP4"
        raise FormatError(f"{described.layout}: cannot represent {said}")
    codes, scale = weight.state["weight"], weight.state["weight_scale"]
    # The package's reader takes whole blocks alone.
    divides("in_features", 2 * codes.shape[1] if weight.columns is None else weight.columns, chosen.block_size, _NAME)
    found = {"weight_packed": codes, "weight_scale": scale}
    return found | ({_GLOBAL: weight.state[_GLOBAL]} if chosen.has_global_scale else {})
