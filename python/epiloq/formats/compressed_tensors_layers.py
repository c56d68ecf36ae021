"""Conversion between one layer's tensors in the layouts of the compressed-tensors package and packed weights.

Defined by its compressors (``compressed_tensors/compressors/{pack_quantized,naive_quantized}``), drawn in
docs/guide/weight_layouts.md. ``pack-quantized`` and ``int-quantized`` weights become a `PackedWeight`; FP8 weights of
``float-quantized`` become a layer, because a `PackedWeight` holds integers only. Users call these functions as
``epiloq.formats.compressed_tensors``; directories are read by `layouts.compressed_tensors` (docs/adding_a_scheme.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epiloq.formats.layouts.base import (
    Codes,
    Expected,
    FormatError,
    check_multiple,
    group_length,
    groups_of,
    order_of,
    require,
    sizes,
)
from epiloq.formats.layouts.words import BITS, pack, unpack, words_of
from epiloq.nn import Fp8BlockLinear, Fp8Linear
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.weights.packed_weight import PackedWeight

_NAME = "compressed-tensors"
FP8 = torch.float8_e4m3fn


def to_packed(
    *,
    weight_scale: Tensor,
    weight_packed: Tensor | None = None,
    weight: Tensor | None = None,
    weight_shape: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    bits: int = 4,
    group_size: int = -1,
) -> PackedWeight:
    """The weight ``[N, K]`` of a layer's tensors, on their device; symmetric without zero points.

    Args:
        weight_packed: int32 ``[N, ceil(K bits / 32)]``, of ``pack-quantized``: values plus 2^(bits-1), packed along K.
        weight: int8 ``[N, K]``, of ``int-quantized`` instead; 8 bits.
        weight_scale: ``[N, G]`` of 16 or 32 bits, whose dtype stays, G = K / group_size.
        weight_shape: int64 ``[2]``, of ``pack-quantized``: N and K; None if its words are full.
        weight_zero_point: of asymmetric weights: int32 ``[ceil(N bits / 32), G]``, packed along N as the weight is;
            with ``weight`` int8 ``[N, G]``.
        weight_g_idx: int32 ``[K]``, the group of each channel, of weights in activation order.
        bits: 2, 3, 4 or 8.
        group_size: -1 for one group, "channel" in the package's words.

    Raises:
        FormatError: a ValueError, which names the tensor that does not fit.
    """
    if (weight_packed is None) == (weight is None):
        raise FormatError(
            f"{_NAME}: weight_packed: expected it or weight, got {'both' if weight is not None else 'neither'}"
        )
    tensors = {"weight_packed": weight_packed, "weight": weight, "weight_scale": weight_scale}
    tensors |= {"weight_zero_point": weight_zero_point, "weight_g_idx": weight_g_idx}
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    rows, columns = _shape(found, weight_shape, bits)
    groups = groups_of(columns, group_size, _NAME)
    check_multiple("in_features", columns, group_length(group_size, columns), _NAME)
    zero_words = (words_of(rows, bits), groups) if weight is None else (rows, groups)
    expected: Expected = {
        "weight_packed": (torch.int32, (rows, words_of(columns, bits))),
        "weight": (torch.int8, (rows, columns)),
        "weight_scale": (None, (rows, groups)),
        "weight_zero_point": (torch.int32 if weight is None else torch.int8, zero_words),
        "weight_g_idx": (torch.int32, (columns,)),
    }
    require(found, {name: wanted for name, wanted in expected.items() if name in found})
    codes = from_words(found, bits, group_size, columns) if weight is None else _from_bytes(found, group_size)
    if weight_g_idx is not None:
        perm = order_of(weight_g_idx, group_length(group_size, columns), _NAME, "weight_g_idx")
        codes = codes if perm is None else replace(codes, q=codes.q[:, perm], perm=perm)
    return codes.packed(symmetric=weight_zero_point is None)


def from_packed(packed: PackedWeight, *, layout: str = "pack-quantized") -> dict[str, Tensor]:
    """The inverse of `to_packed`, byte for byte; scales keep their dtype.

    A redundant ``weight_g_idx``, whose groups are in order, is omitted.

    Args:
        layout: "pack-quantized", or "int-quantized" for 8 bits.

    Raises:
        FormatError: real offsets, a short last group, a zero point of 2^bits, or for "int-quantized" other bits.
    """
    if layout not in ("pack-quantized", "int-quantized"):
        raise FormatError(f"{_NAME}: layout: expected pack-quantized or int-quantized, got {layout!r}")
    check_multiple("in_features", packed.k, group_length(packed.group_size, packed.k), _NAME)
    codes = Codes.of_packed(packed, _NAME)
    order = {} if packed.perm is None else {"weight_g_idx": codes.group_index()}
    if layout == "int-quantized":
        if packed.bits != 8:
            raise FormatError(f"{_NAME}: int-quantized: expected 8 bits, got {packed.bits}")
        zeros = {} if packed.symmetric else {"weight_zero_point": signed(codes.zero)}
        return {"weight": signed(codes.in_order().q), "weight_scale": codes.scale} | zeros | order
    return to_words(codes, packed.symmetric) | order


def to_words(codes: Codes, symmetric: bool) -> dict[str, Tensor]:
    """A weight's tensors in ``pack-quantized``, without zero points where it is symmetric."""
    zeros = {} if symmetric else {"weight_zero_point": pack(codes.zero.t(), codes.bits).t().contiguous()}
    shape = torch.tensor(codes.q.shape, dtype=torch.int64, device=codes.q.device)
    words = pack(codes.in_order().q, codes.bits)
    return {"weight_packed": words, "weight_scale": codes.scale, "weight_shape": shape} | zeros


def from_words(tensors: Mapping[str, Tensor], bits: int, group_size: int, columns: int) -> Codes:
    """The inverse of `to_words`, for tensors of the right sizes; a symmetric weight's have no zero points."""
    q, scale, zeros = unpack(tensors["weight_packed"], bits, columns), tensors["weight_scale"], None
    if "weight_zero_point" in tensors:
        zeros = unpack(tensors["weight_zero_point"].t(), bits, q.shape[0]).t().int()
    return Codes(q, scale, _or_middle(zeros, scale, bits), None, bits, group_size)


def _from_bytes(tensors: Mapping[str, Tensor], group_size: int) -> Codes:
    scale, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
    zeros = None if zeros is None else _unsigned(zeros).int()
    return Codes(_unsigned(tensors["weight"]), scale, _or_middle(zeros, scale, 8), None, 8, group_size)


def _or_middle(zeros: Tensor | None, scale: Tensor, bits: int) -> Tensor:
    return torch.full_like(scale, 1 << (bits - 1), dtype=torch.int32) if zeros is None else zeros


def to_fp8(
    *, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None = None, bias: Tensor | None = None
) -> Fp8Linear | Fp8BlockLinear:
    """The layer of ``float-quantized`` tensors, on their device, in bias's dtype (else torch's default one).

    Args:
        weight: float8_e4m3fn ``[N, K]``.
        weight_scale: of 16 or 32 bits: ``[1]`` for the tensor, ``[N, 1]`` for channels, ``[ceil(N / 128),
            ceil(K / 128)]`` for blocks.
        input_scale: ``[1]`` if activations have a static scale; otherwise scales are computed at run time, per token,
            or per group of 128 with blocks.
        bias: ``[N]``.

    Raises:
        FormatError: a ValueError, which names the tensor that does not fit.
    """
    if weight.dtype != FP8 or weight.ndim != 2:
        raise FormatError(f"weight: expected {FP8} with 2 dimensions, got {weight.dtype} {list(weight.shape)}")
    rows, columns = weight.shape
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    # Among equal shapes the last one applies: the scale of a single row is treated as a scale per row.
    kinds = {blocks: "block", (1,): "tensor", (rows, 1): "channel"}
    kind = kinds.get(tuple(weight_scale.shape))
    if kind is None or (kind == "block" and input_scale is not None):
        wanted = " or ".join(str(list(shape)) for shape, k in kinds.items() if k != "block" or input_scale is None)
        raise FormatError(f"weight_scale: expected {wanted}, got {list(weight_scale.shape)}")
    given = {"weight": weight, "weight_scale": weight_scale, "input_scale": input_scale, "bias": bias}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    expected: Expected = {
        "weight": (FP8, (rows, columns)),
        "weight_scale": (None, tuple(weight_scale.shape)),
        "input_scale": (None, (1,)),
        "bias": (None, (rows,)),
    }
    require(tensors, {name: wanted for name, wanted in expected.items() if name in tensors})
    place: dict[str, Any] = {"device": weight.device, "dtype": None if bias is None else bias.dtype}
    if kind == "block":
        tensors["weight_scale_inv"] = tensors.pop("weight_scale")
        layer: Fp8Linear | Fp8BlockLinear = Fp8BlockLinear(columns, rows, bias is not None, **place)
    else:
        activation = "token" if input_scale is None else "static"
        tensors["weight_scale"] = weight_scale.flatten()
        layer = Fp8Linear(columns, rows, bias is not None, activation=activation, weight=kind, **place)
    layer.load_state_dict({name: t if name in ("weight", "bias") else t.float() for name, t in tensors.items()})
    return layer


def from_fp8(layer: Fp8Linear | Fp8BlockLinear, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The inverse of `to_fp8`; exact if `dtype` is the scales' original dtype."""
    state = layer.file_state()
    if isinstance(layer, Fp8BlockLinear):
        scale = state["weight_scale_inv"]
    else:
        scale = state["weight_scale"] if layer.weight_scales == "tensor" else state["weight_scale"].unsqueeze(1)
    tensors = {"weight": state["weight"], "weight_scale": scale.to(dtype)}
    if "input_scale" in state:
        tensors["input_scale"] = state["input_scale"].to(dtype)
    return tensors | ({"bias": state["bias"]} if "bias" in state else {})


def _shape(found: dict[str, Tensor], weight_shape: Tensor | None, bits: int) -> tuple[int, int]:
    """N and K of a layer's tensors."""
    if bits not in BITS:
        raise FormatError(f"{_NAME}: bits: expected one of {BITS}, got {bits}")
    if "weight" in found:
        if bits != 8:
            raise FormatError(f"{_NAME}: bits: expected 8 with an unpacked weight, got {bits}")
        return sizes("weight", found["weight"])
    rows, words = sizes("weight_packed", found["weight_packed"])
    if weight_shape is None:
        if words * 32 % bits:
            raise FormatError(f"weight_shape: expected one, as {words} words of {bits} bits are not full, got None")
        return rows, words * 32 // bits
    if weight_shape.dtype != torch.int64 or weight_shape.shape != (2,):
        got = f"{weight_shape.dtype} {list(weight_shape.shape)}"
        raise FormatError(f"weight_shape: expected torch.int64 [2], got {got}")
    declared = weight_shape.tolist()
    if declared[0] != rows or words_of(declared[1], bits) != words:
        wanted = [declared[0], words_of(declared[1], bits)]
        raise FormatError(f"weight_packed: expected {wanted} for weight_shape {declared}, got {[rows, words]}")
    return rows, declared[1]


def _unsigned(values: Tensor) -> Tensor:
    """int8 plus 128, as uint8."""
    return (values.to(torch.int16) + 128).to(torch.uint8)


def signed(values: Tensor, middle: int = 128) -> Tensor:
    """Integers up to 255 less the middle, as int8."""
    return (values.to(torch.int16) - middle).to(torch.int8)
