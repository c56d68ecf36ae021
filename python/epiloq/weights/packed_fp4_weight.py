"""PackedFp4Weight: FP4 weights in the kernels' order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, reads_values
from epiloq._torch.dense import row_chunks
from epiloq._torch.library import register
from epiloq.weights.fp4 import BIAS, FORMATS, Fp4Format, check_weight, dequantized_rows, format_of, packed
from epiloq.weights.packed.tensors import PackedTensors
from epiloq.weights.packed_layout import (
    PANEL_ROWS,
    codes_of,
    groups_of,
    packed_codes,
    packed_parameters,
    parameters_of,
    shapes_of,
)
from epiloq.weights.tensor_checks import check_memory, refuse

_PACK = "pack_fp4_weight"
ONE = {"mxfp4": BIAS, "nvfp4": 0x58}
"""Byte that encodes a scale of 1, used for padding, by format."""
# A non-negative E4M3 scale times _STEP as float16 has only the upper eight bits after the sign set.
_STEP, _SHIFT = 128, 7
_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False, repr=False)
class PackedFp4Weight(PackedTensors):
    """A weight ``[n, k]`` of E2M1 numbers, ``W = e2m1(code) * scale * global_scale``; made by `pack_fp4_weight`.

    - ``q``: uint8 ``[panels, K / 64, 32, 16]``, the codes in the order of a `PackedWeight` with 4 bits, K padded to a
      multiple of 128 and rows to one of 16 with codes of 0;
    - ``scale``: uint8 ``[panels, blocks, 16]``: for "mxfp4" the E8M0 bytes; for "nvfp4" the upper eight bits after
      the sign of ``128 * scale`` as float16, which represent any non-negative E4M3 number;
    - ``global_scale``: float32 ``[E]``, one for each of E stacked matrices with the same number of rows, or None for 1.
    """

    TENSORS = ("q", "scale", "global_scale")

    q: Tensor
    scale: Tensor
    global_scale: Tensor | None
    format: str
    n: int
    k: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.n, self.k))

    @property
    def group_size(self) -> int:
        """Weights of a row that share a scale."""
        return FORMATS[self.format].block_size

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(codes, scale, global_scale)`` as given to `pack_fp4_weight`; codes in blocks with a scale of 0 are 0."""
        scale = unpacked_scales(self.scale, self.format, self.n, self.k)
        return unpacked_codes(self.q, self.n, self.k), scale, self.global_scale

    def row_slice(self, first: int, last: int) -> PackedFp4Weight:
        """Rows `first` (a multiple of 16) to `last`, which must belong to one matrix, sharing memory."""
        panels = slice(first // PANEL_ROWS, -(-last // PANEL_ROWS))
        global_scale = self.global_scale
        if global_scale is not None and global_scale.numel() > 1:
            matrix = first // (self.n // global_scale.numel())
            global_scale = global_scale[matrix : matrix + 1]
        return replace(self, q=self.q[panels], scale=self.scale[panels], global_scale=global_scale, n=last - first)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[n, k]``, bit-identical to `epiloq.fp4_dequantize`."""
        arguments = (self.q, self.scale, self.global_scale, self.format, self.n, self.k, dtype)
        if direct((self.q, self.scale), (self.global_scale,)):
            return _dequantize(*arguments)
        result: Tensor = torch.ops.epiloq.dequantize_packed_fp4(*arguments)
        return result

    def row_chunks(self, at_once: int) -> list[slice]:
        """Ranges of rows that begin with a panel, with about `at_once` numbers each."""
        panels = -(-self.n // PANEL_ROWS)
        found = row_chunks(panels, PANEL_ROWS * self.k, at_once)
        return [slice(p.start * PANEL_ROWS, min(p.stop * PANEL_ROWS, self.n)) for p in found]

    def rows(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Dequantise rows of one matrix, beginning with a panel."""
        codes, scale, global_scale = self.row_slice(rows.start, rows.stop).unpack()
        return dequantized_rows(codes, scale, global_scale, self.k, dtype, slice(None))

    def float8_rows(self) -> tuple[Tensor, Tensor]:
        """An MXFP4 weight on CUDA as float8_e4m3fn ``[n, k]`` and scales ``[n, 1]``, a power of two for each row.

        Exact if the scales of a row's blocks that are not all zeros differ by at most 2^14; smaller numbers are rounded
        to multiples of 2^-15 times the largest of these scales.
        """
        rows = self.q.new_empty((self.n, self.k), dtype=torch.float8_e4m3fn)
        row_scale = self.q.new_empty(self.n, dtype=torch.float32)
        _core.dequantize_fp4(rows, self.q, self.scale, None, row_scale, self.format, self.n, self.k)
        if self.global_scale is not None:
            row_scale.mul_(self.global_scale)
        return rows, row_scale[:, None]

    def __repr__(self) -> str:
        return f"PackedFp4Weight({list(self.shape)}, {self.format}, {self.q.device})"


def pack_fp4_weight(
    codes: Tensor, scale: Tensor, *, in_features: int, global_scale: Tensor | None = None
) -> PackedFp4Weight:
    """Pack a weight ``[N, K]``, or E stacked weights with the same number of rows, for `epiloq.packed_fp4_mm`.

    Args:
        codes: uint8 ``[N, ceil(K / 2)]``, as for `epiloq.fp4_dequantize`.
        scale: uint8 or float8_e8m0fnu (MXFP4), or float8_e4m3fn (NVFP4), likewise. Scales of NVFP4 are not negative.
        in_features: K.
        global_scale: float32, one element, or ``[E]`` for E matrices, where N is a multiple of 16 E.

    Returns:
        The weight on codes' device.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
    """
    expect_tensors(_PACK, {"codes": codes, "scale": scale}, {"global_scale": global_scale}, writes=False)
    if type(in_features) is not int or in_features < 0:
        refuse(_PACK, "in_features", "an integer from 0", in_features)
    check_weight(codes, scale, None, in_features, _PACK)
    n, chosen = codes.shape[0], format_of(scale, _PACK)
    if global_scale is not None:
        matrices = global_scale.numel()
        if global_scale.dtype != torch.float32 or global_scale.device != codes.device or matrices < 1:
            refuse(
                _PACK,
                "global_scale",
                f"float32 on {codes.device}",
                f"{global_scale.dtype} {list(global_scale.shape)} on {global_scale.device}",
            )
        if matrices > 1 and n % (matrices * PANEL_ROWS):
            refuse(
                _PACK,
                "global_scale",
                f"one element, or one for each matrix of a multiple of {PANEL_ROWS} rows",
                matrices,
            )
        global_scale = global_scale.reshape(matrices)
    stored = packed_scales(scale, chosen, in_features)
    q = without_codes_of_zeros(pack_codes(codes, in_features), stored, chosen)
    return PackedFp4Weight(q, stored, global_scale, chosen.name, n, in_features)


def shapes_of_parts(format: str, n: int, k: int) -> dict[str, tuple[int, ...]]:
    """Shapes of `q` and `scale`."""
    return {name: shapes_of(4, n, k, FORMATS[format].block_size)[name] for name in ("q", "scale")}


def pack_codes(codes: Tensor, k: int) -> Tensor:
    """Convert codes ``[N, ceil(k / 2)]`` to `q`."""
    return packed_codes(torch.stack((codes & 15, codes >> 4), 2).flatten(1)[:, :k], 4)


def unpacked_codes(q: Tensor, n: int, k: int) -> Tensor:
    """Convert `q` to codes ``[n, ceil(k / 2)]``."""
    each = codes_of(q, 4)[:n, : k + k % 2]
    return packed(each)


def packed_scales(scale: Tensor, chosen: Fp4Format, k: int) -> Tensor:
    """Convert block scales ``[N, ceil(k / block)]`` to `scale`. Raises ValueError for negative ones."""
    if chosen.name == "mxfp4":
        bytes_of = scale.view(torch.uint8)
    else:
        values = scale.float()
        if not values.is_meta and bool((values < 0).any()):
            refuse(_PACK, "scale", "no negative numbers", f"{values.nan_to_num(nan=0).min().item():g}")
        # NaN of either sign becomes the positive one.
        half = torch.where(values.isnan(), torch.nan, values.abs() * _STEP).to(torch.float16)
        bytes_of = (half.view(torch.int16) >> _SHIFT).to(torch.uint8)
    n, given = bytes_of.shape
    panels, groups, _ = shapes_of_parts(chosen.name, n, k)["scale"]
    filled = torch.nn.functional.pad(bytes_of, (0, groups - given, 0, panels * PANEL_ROWS - n), value=ONE[chosen.name])
    return packed_parameters(filled, groups)


def unpacked_scales(scale: Tensor, format: str, n: int, k: int) -> Tensor:
    """Convert `scale` to block scales ``[n, ceil(k / block)]`` in the format's dtype."""
    chosen = FORMATS[format]
    bytes_of = parameters_of(scale)[:n, : groups_of(k, chosen.block_size)]
    if format == "mxfp4":
        return bytes_of.contiguous()
    half = (bytes_of.to(torch.int16) << _SHIFT).view(torch.float16)
    return (half.float() / _STEP).to(chosen.scale_dtype)


def without_codes_of_zeros(q: Tensor, scale: Tensor, chosen: Fp4Format) -> Tensor:
    """Set codes in blocks of scale 0 to 0, because kernels read that scale as a small number."""
    if chosen.name == "mxfp4" or q.is_meta:
        return q
    if reads_values(scale) and not bool((scale == 0).any()):
        return q
    there = (parameters_of(scale) != 0).to(torch.uint8).repeat_interleave(chosen.block_size, 1)
    return packed_codes(codes_of(q, 4) * there[:, : q.shape[1] * 64], 4)


@torch.no_grad()
def _dequantize(
    q: Tensor, scale: Tensor, global_scale: Tensor | None, format: str, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    for name, tensor in (("q", q), ("scale", scale), ("global_scale", global_scale)):
        if tensor is not None:
            check_memory(name, tensor, q.device, "dequantize_packed_fp4")
    weight = PackedFp4Weight(q, scale, global_scale, format, n, k)
    out = q.new_empty((n, k), dtype=dtype)
    if out.is_cuda:
        _core.dequantize_fp4(out, q, scale, global_scale, None, format, n, k)
        return out
    matrices = 1 if global_scale is None else global_scale.numel()
    for first in range(0, n, max(n // matrices, 1)):
        one = weight.row_slice(first, first + n // matrices)
        for rows in one.row_chunks(_AT_ONCE):
            out[first + rows.start : first + rows.stop] = one.rows(rows, dtype)
    return out


def _fake_dequantize(q: Tensor, *rest: Any) -> Tensor:
    _, _, _, n, k, dtype = rest
    return q.new_empty((n, k), dtype=dtype)


register(
    "dequantize_packed_fp4",
    "dequantize_packed_fp4(Tensor q, Tensor scale, Tensor? global_scale, str format, SymInt n, SymInt k, "
    "ScalarType dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
)
