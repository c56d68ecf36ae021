"""The Marlin layout: tiles of 16 x 64 in the order of mma fragments, scales and zero points permuted to fit.

Defined by IST-DASLab's Marlin (names ``B`` and ``s``) and its descendant in vLLM
(``model_executor/layers/quantization/utils/marlin_utils*.py``), drawn in docs/guide/weight_layouts.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq.formats.layouts.base import (
    Codes,
    Expected,
    FormatError,
    check_multiple,
    check_order,
    check_shape,
    group_length,
    groups_of,
    require,
    sizes,
)
from epiloq.formats.layouts.words import pack, unpack
from epiloq.weights.packed_weight import PackedWeight

TILE_K, TILE_N = 16, 64
GROUP_SIZES = (-1, 32, 64, 128)
# Zero point that field i of a word holds.
INTERLEAVE = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
# A tile's values by row 8 h + 2 t + e and column 16 j + 8 b + c lie in the order of these axes.
_AXES = ("h", "t", "e", "j", "b", "c")
_SIZES = {"h": 2, "t": 4, "e": 2, "j": 4, "b": 2, "c": 8}
_ORDERS = {4: ("c", "t", "j", "e", "b", "h"), 8: ("c", "t", "j", "b", "e", "h")}


def to_packed(
    B: Tensor,
    s: Tensor,
    qzeros: Tensor | None = None,
    g_idx_sort_indices: Tensor | None = None,
    *,
    group_size: int,
    bits: int = 4,
    shape: tuple[int, int] | None = None,
) -> PackedWeight:
    """The weight ``[N, K]`` of a layer's tensors, on their device; symmetric without zero points.

    Args:
        B: int32 ``[K / 16, N bits / 2]``, values plus 2^(bits-1) unless there are zero points.
        s: ``[G, N]`` of 16 or 32 bits, whose dtype stays, G = K / group_size.
        qzeros: int32 ``[G, N bits / 32]``, of vLLM's Marlin only, under vLLM's name.
        g_idx_sort_indices: int32 ``[K]``, of vLLM's Marlin only: row j of B is input channel g_idx_sort_indices[j].
        group_size: -1 (one group), 32, 64 or 128.
        bits: 4 or 8.
        shape: [N, K], checked against the tensors' shapes.

    Raises:
        FormatError: a ValueError, which names the tensor that does not fit.
    """
    _check(bits, group_size)
    tiles, words = sizes("B", B)
    rows, columns = words * 2 // bits, tiles * TILE_K
    check_shape("marlin", (rows, columns), shape)
    groups = _groups(rows, columns, group_size)
    tensors = {"B": B, "s": s}
    expected: Expected = {"B": (torch.int32, (tiles, rows * bits // 2)), "s": (None, (groups, rows))}
    if qzeros is not None:
        tensors |= {"qzeros": qzeros}
        expected = {**expected, "qzeros": (torch.int32, (groups, rows * bits // 32))}
    if g_idx_sort_indices is not None:
        tensors |= {"g_idx_sort_indices": g_idx_sort_indices}
        expected = {**expected, "g_idx_sort_indices": (torch.int32, (columns,))}
    require(tensors, expected)
    if g_idx_sort_indices is not None:
        check_order("g_idx_sort_indices", g_idx_sort_indices)
    scale = _scales(s, columns, group_size).t()
    if qzeros is None:
        zero = torch.full_like(scale, 1 << (bits - 1), dtype=torch.int32)
    else:
        zero = _columns(unpack(qzeros, bits, rows, INTERLEAVE[bits])).t().int()
    codes = Codes(_values(B, bits, rows, columns), scale, zero, g_idx_sort_indices, bits, group_size)
    return codes.packed(symmetric=qzeros is None)


def from_packed(packed: PackedWeight) -> dict[str, Tensor]:
    """The inverse of `to_packed`, byte for byte; scales keep their dtype.

    Raises FormatError for other bits and groups, sizes that do not fill tiles or groups, and real offsets.
    """
    _check(packed.bits, packed.group_size)
    _groups(packed.n, packed.k, packed.group_size)
    codes = Codes.of_packed(packed, "marlin")
    tensors = {
        "B": _words(codes.q, codes.bits),
        "s": _scales(codes.scale.t(), packed.k, packed.group_size),
    }
    if packed.zero is not None:
        tensors["qzeros"] = pack(_columns(codes.zero.t()), codes.bits, INTERLEAVE[codes.bits])
    if packed.perm is not None:
        tensors["g_idx_sort_indices"] = packed.perm.to(torch.int32)
    return tensors


def _check(bits: int, group_size: int) -> None:
    if bits not in INTERLEAVE:
        raise FormatError(f"marlin: bits: expected 4 or 8, got {bits}")
    if group_size not in GROUP_SIZES:
        raise FormatError(f"marlin: group_size: expected one of {GROUP_SIZES}, got {group_size}")


def _groups(rows: int, columns: int, group_size: int) -> int:
    check_multiple("out_features", rows, TILE_N, "marlin")
    check_multiple("in_features", columns, TILE_K, "marlin")
    check_multiple("in_features", columns, group_length(group_size, columns), "marlin")
    return groups_of(columns, group_size, "marlin")


def _words(q: Tensor, bits: int) -> Tensor:
    """uint8 ``[N, K]`` as int32 ``[K / 16, N bits / 2]``."""
    rows, columns = q.shape
    tiles = q.t().reshape(columns // TILE_K, *_tile(*_AXES[:3]), rows // TILE_N, *_tile(*_AXES[3:]))
    places = {axis: 1 + i + (i >= 3) for i, axis in enumerate(_AXES)}
    in_order = tiles.permute(0, 4, *(places[axis] for axis in _ORDERS[bits]))
    return pack(in_order.reshape(columns // TILE_K, rows * TILE_K), bits)


def _values(words: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    """The inverse of `_words`."""
    order = _ORDERS[bits]
    values = unpack(words, bits, rows * TILE_K).view(columns // TILE_K, rows // TILE_N, *_tile(*order))
    places = {axis: 2 + i for i, axis in enumerate(order)}
    column, row = ([places[axis] for axis in part] for part in (_AXES[3:], _AXES[:3]))
    return values.permute(1, *column, 0, *row).reshape(rows, columns)


def _tile(*axes: str) -> tuple[int, ...]:
    return tuple(_SIZES[axis] for axis in axes)


def _columns(values: Tensor) -> Tensor:
    """Transpose each 64 columns, as 8 x 8, of parameters ``[G, N]`` of several groups; this is its own inverse."""
    return values.reshape(-1, 8, 8).transpose(1, 2).reshape(values.shape)


def _scales(values: Tensor, columns: int, group_size: int) -> Tensor:
    """Permute scales ``[G, N]``; for a single group, swap the first two axes of each 32 columns as 4 x 4 x 2."""
    if group_length(group_size, columns) < columns:
        return _columns(values)
    return values.reshape(-1, 4, 4, 2).transpose(1, 2).reshape(values.shape)
