"""Layouts with two 4-bit integers a byte: ModelOpt's, two rows, defined by its ``pack_int4_in_uint8``; torchao's
``Int4Tensor``, two columns, with scales and real offsets by group first (``[K / group, N]``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from epiloq.formats.description import INT4_FOR_FP8, Description
from epiloq.formats.layouts.base import Codes, Expected, FormatError, check_multiple, groups_of, require
from epiloq.formats.weights import OffsetWeight, Weight
from epiloq.weights.grid import QuantizedWeight
from epiloq.weights.packed_weight import pack_weight

PARTS = frozenset({"weight", "weight_scale"})
ASIDE = {"modelopt int4": frozenset[str](), INT4_FOR_FP8: frozenset({"weight_scale_2", "input_scale"})}
"""Unused tensors of a layer, by layout: scales for rounding integers and activations to FP8."""
_MIDDLE = 8


def from_tensors(tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int]) -> QuantizedWeight:
    """The weight that a layer's tensors represent. Raises FormatError for inconsistent tensors."""
    grid = described.grid
    assert grid is not None
    check(tensors, described, shape)
    codes = tensors["weight"]
    # Two's complement, even rows in the low half; adding 8 makes it unsigned.
    q = torch.stack((codes & 15, codes >> 4), 1).flatten(0, 1) ^ _MIDDLE
    scale = tensors["weight_scale"].float()
    zero = torch.full_like(scale, _MIDDLE, dtype=torch.int32)
    return Codes(q, scale, zero, None, 4, grid.group_size).quantized(grid)


def check(tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int]) -> None:
    """Raise FormatError for tensors of other types and shapes than a layer's."""
    rows, columns = shape
    check_multiple("out_features", rows, 2, described.layout)
    check_multiple("in_features", columns, described.group_size, described.layout)
    groups = columns // described.group_size
    require(tensors, {"weight": (torch.uint8, (rows // 2, columns)), "weight_scale": (None, (rows, groups))})


def to_tensors(weight: QuantizedWeight, described: Description, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inverse of `from_tensors`, scales in `dtype`. Raises FormatError for what the layout cannot represent."""
    rows, columns = weight.q.shape
    if weight.bits != 4 or weight.zero is not None or weight.perm is not None:
        raise FormatError(f"{described.layout}: expected symmetric integers of 4 bits, without activation order")
    check_multiple("out_features", rows, 2, described.layout)
    check_multiple("in_features", columns, weight.grid.length(columns), described.layout)
    q = Codes.of(weight).q ^ _MIDDLE
    return {"weight": q[0::2] | (q[1::2] << 4), "weight_scale": weight.scale.to(dtype)}


def by_columns(tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int]) -> Weight:
    """The weight of torchao's tensors, ``scale * q + zero_point`` with q from -8 to 7. Raises FormatError for
    inconsistent tensors."""
    check_columns(tensors, described, shape)
    codes = tensors["_weight_qdata"].view(torch.uint8)
    # Two's complement, even columns in the low half; adding 8 makes it unsigned.
    q = torch.stack((codes & 15, codes >> 4), 2).flatten(1, 2) ^ _MIDDLE
    scale, offset = (tensors[name].float().t().contiguous() for name in ("_weight_scale", "_weight_zero_point"))
    if described.grid is None:
        group = described.group_size
        return OffsetWeight.of(pack_weight(q, scale, offset=offset - _MIDDLE * scale, bits=4, group_size=group))
    zero = torch.full_like(scale, _MIDDLE, dtype=torch.int32)
    return Codes(q, scale, zero, None, 4, described.group_size).quantized(described.grid)


def check_columns(tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int]) -> None:
    """Raise FormatError for tensors of other types and shapes than a layer's in torchao."""
    rows, columns = shape
    check_multiple("in_features", columns, 2, described.layout)
    parameters = (groups_of(columns, described.group_size, described.layout), rows)
    codes = tensors.get("_weight_qdata")
    dtype = torch.uint8 if codes is not None and codes.dtype == torch.uint8 else torch.int8
    expected: Expected = {"_weight_scale": (None, parameters), "_weight_zero_point": (None, parameters)}
    require(tensors, {"_weight_qdata": (dtype, (rows, columns // 2)), **expected})
