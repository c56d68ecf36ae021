"""The layouts of the compressed-tensors package: ``pack-quantized`` and ``int-quantized``; `float8` has the others.

Its reader multiplies in the scale's dtype, so scales of weight-only layers are written in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from epiloq.formats.compressed_tensors_layers import from_fp8, from_packed, signed, to_fp8, to_packed, to_words
from epiloq.formats.description import Description
from epiloq.formats.layouts.base import Codes, Expected, FormatError, check_multiple, group_length, order_of, require
from epiloq.formats.layouts.words import unpack, words_of
from epiloq.weights.grid import Grid, InputGrid, QuantizedWeight

__all__ = ["from_fp8", "from_packed", "from_tensors", "parts", "to_fp8", "to_packed", "to_tensors"]

PACKED, INTEGER = "pack-quantized", "int-quantized"
_NAME = "compressed-tensors"


def to_tensors(weight: QuantizedWeight, described: Description, dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer's tensors by the last part of their names.

    Scales have `dtype`, or float32 for 8-bit weights with 8-bit inputs.

    Raises FormatError for what it cannot represent: a shorter last group, or different scales of channels with one
    scale per tensor.
    """
    if described.bits != weight.bits:  # Layers have 5 to 7 bits in 8.
        weight = replace(weight, grid=replace(weight.grid, bits=described.bits))
    columns = weight.q.shape[1]
    check_multiple("in_features", columns, weight.grid.length(columns), f"{_NAME} (gptq has short last groups)")
    of_groups = described.inputs is None or (described.quantization is not None and described.quantization.w4a8)
    if not of_groups and weight.zero is not None:
        raise FormatError(f"{_NAME}: int-quantized: expected 8 bits and a symmetric grid")
    codes, middle = Codes.of(weight), 1 << (weight.bits - 1)
    tensors = to_words(codes, weight.zero is None)
    if described.layout == INTEGER:
        in_order = codes.in_order().q
        tensors = {"weight": signed(in_order, middle), "weight_scale": weight.scale}
        tensors |= {} if weight.zero is None else {"weight_zero_point": signed(weight.zero, middle)}
    if weight.perm is not None:
        tensors["weight_g_idx"] = codes.group_index()
    if of_groups:
        tensors["weight_scale"] = weight.scale.to(dtype)
    if described.strategy == "tensor":
        tensors |= _one(tensors, weight, middle)
    inputs = weight.inputs
    scales = {} if inputs is None else {"input_scale": inputs.scale, "input_zero_point": inputs.zero.to(torch.int8)}
    return tensors | scales


def _one(tensors: Mapping[str, Tensor], weight: QuantizedWeight, middle: int) -> dict[str, Tensor]:
    """Return the parameters of a whole tensor. Raises FormatError if channels differ."""
    zero = weight.zero
    if bool((weight.scale != weight.scale[0, 0]).any()) or (zero is not None and bool((zero != zero[0, 0]).any())):
        raise FormatError(f"{_NAME}: expected one scale for the tensor, but channels differ")
    found = {"weight_scale": tensors["weight_scale"].flatten()[:1]}
    return found if zero is None else found | {"weight_zero_point": signed(zero.flatten()[:1], middle)}


def from_tensors(tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int]) -> QuantizedWeight:
    """The inverse of `to_tensors` for a layer ``[N, K]``. Raises FormatError for tensors that disagree with it."""
    (rows, columns), grid = shape, described.grid
    assert grid is not None
    bits = grid.bits
    tensors = {name: t.reshape(1) if t.ndim == 0 else t for name, t in tensors.items()}
    groups = -(-columns // grid.length(columns))
    one = described.strategy == "tensor"
    values: Expected = {"weight": (torch.int8, shape)}
    if described.layout == PACKED:
        values = {"weight_packed": (torch.int32, (rows, words_of(columns, bits))), "weight_shape": (torch.int64, (2,))}
    require(tensors, {**values, "weight_scale": (None, (1,) if one else (rows, groups))})
    if described.layout == PACKED:
        if tuple(tensors["weight_shape"].tolist()) != shape:
            raise FormatError(f"weight_shape: expected {list(shape)}, got {tensors['weight_shape'].tolist()}")
        q = unpack(tensors["weight_packed"], bits, columns)
    else:
        q = _unsigned("weight", tensors["weight"], bits)
    scale = tensors["weight_scale"].float().expand(rows, groups) if one else tensors["weight_scale"]
    zero = _zero(tensors, grid, (rows, groups), described)
    perm = _order(tensors.get("weight_g_idx"), grid, columns)
    codes = Codes(q if perm is None else q[:, perm], scale, zero, perm, bits, grid.group_size)
    made = codes.quantized(grid)
    return QuantizedWeight(made.q, made.scale, made.zero, grid, made.perm, inputs=_inputs(tensors, described))


def _zero(tensors: Mapping[str, Tensor], grid: Grid, shape: tuple[int, int], described: Description) -> Tensor:
    """Zero points ``[N, G]``; the middle if there are none. Those of a symmetric layer are ignored."""
    (rows, groups), middle, name = shape, 1 << (grid.bits - 1), "weight_zero_point"
    found = tensors.get(name)
    if found is None and grid.symmetric:
        return torch.full(shape, middle, dtype=torch.int32, device=tensors["weight_scale"].device)
    if found is not None and found.dtype == torch.int32 and described.layout == PACKED:
        require(tensors, {name: (torch.int32, (words_of(rows, grid.bits), groups))})
        zero = unpack(found.t(), grid.bits, rows).t().int()
    else:
        # Packed zero points have a name of their own; earlier versions of the package did not pack them.
        packed = described.layout == PACKED and (found is None or found.dtype != torch.int8)
        wanted = (words_of(rows, grid.bits), groups) if packed else (1,) if described.strategy == "tensor" else shape
        require(tensors, {name: (torch.int32 if packed else torch.int8, wanted)})
        zero = _unsigned(name, tensors[name], grid.bits).int().expand(shape)
    if grid.symmetric and bool((zero != middle).any()):
        raise FormatError(f"{name}: expected zeros of a symmetric layer")
    return zero.contiguous()


def _order(index: Tensor | None, grid: Grid, columns: int) -> Tensor | None:
    # The package marks groups in order by -1.
    if index is None or bool((index == -1).any()):
        return None
    require({"weight_g_idx": index}, {"weight_g_idx": (torch.int32, (columns,))})
    return order_of(index, group_length(grid.group_size, columns), _NAME, "weight_g_idx")


def _inputs(tensors: Mapping[str, Tensor], described: Description) -> InputGrid | None:
    if not described.is_static:
        return None
    zero = tensors.get("input_zero_point")  # None for symmetric inputs
    require(tensors, {"input_scale": (None, (1,))} | ({} if zero is None else {"input_zero_point": (torch.int8, (1,))}))
    scale = tensors["input_scale"].float()
    return InputGrid(scale, torch.zeros_like(scale, dtype=torch.int32) if zero is None else zero.int())


def parts(described: Description) -> frozenset[str]:
    """Every tensor that a layer may have other than its bias, by the last part of its name."""
    inputs = ("input_scale", "input_zero_point") if described.is_static else ()
    values = ("weight_packed", "weight_shape") if described.layout == PACKED else ("weight",)
    return frozenset({*values, "weight_scale", "weight_zero_point", "weight_g_idx", *inputs})


def _unsigned(name: str, values: Tensor, bits: int) -> Tensor:
    """int8 values of the given number of bits plus the middle, as uint8. Raises FormatError for values out of range."""
    moved = values.to(torch.int16) + (1 << (bits - 1))
    if bool((moved >> bits).any()):
        raise FormatError(f"{name}: expected integers of {bits} bits, got larger ones")
    return moved.to(torch.uint8)
