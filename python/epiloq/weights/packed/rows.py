"""Lookup and dequantisation of single rows of a packed weight, for embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq.weights.packed_layout import PANEL_ROWS, narrow_values
from epiloq.weights.packed_weight import PackedWeight

# Columns of a packed tile with 8 bits, and with fewer.
_NARROW, _WIDE = 32, 64


def rows_of(packed: PackedWeight, rows: Tensor) -> Tensor:
    """Dequantise the rows int64 ``[T]`` of a weight without activation order to float32 ``[T, K]``.

    The result is bit-identical to ``packed.dequantize()[rows]``. A row outside 0 to N - 1 raises IndexError on a CPU,
    and fails an assertion of the kernel on a GPU.
    """
    # Padding rows and negative indices are invalid, too.
    rows = torch.where((rows >= 0) & (rows < packed.n), rows, packed.q.shape[0] * PANEL_ROWS)
    panel, place = rows // PANEL_ROWS, rows % PANEL_ROWS
    values = _codes(packed.q, packed.bits, panel, place)[:, : packed.k].to(torch.float32)
    scale, zero, offset = (
        None if t is None else _spread(_parameters(t, panel, place).to(torch.float32), packed)
        for t in (packed.scale, packed.zero, packed.offset)
    )
    if zero is not None:
        values = values - zero
    elif offset is None:
        values = values - (1 << (packed.bits - 1))
    assert scale is not None
    values = values * scale
    return values if offset is None else values + offset


def _codes(q: Tensor, bits: int, panel: Tensor, place: Tensor) -> Tensor:
    """Unsigned integers of the rows ``place`` of their panels, in the order of `packed_layout.packed_codes`."""
    half, row = place // 8, place % 8
    panels, tiles = q.shape[:2]
    if bits == 8:
        # Dimensions: panel tile row t i p half e.
        found = q.view(panels, tiles, 8, 4, 2, 2, 2, 2)[panel, :, row, :, :, :, half]
        return found.permute(0, 1, 3, 4, 2, 5).reshape(panel.shape[0], tiles * _NARROW)
    if bits == 4:
        # Dimensions: panel tile row t i e p.
        pairs = q.view(panels, tiles, 8, 4, 4, 2, 2)[panel, :, row]
        shift = (half * 4).to(torch.uint8).view(-1, 1, 1, 1, 1, 1)
        return (pairs >> shift & 15).permute(0, 1, 3, 5, 2, 4).reshape(panel.shape[0], tiles * _WIDE)
    # Dimensions: number tile t b e f p r, of both halves.
    both = narrow_values(q.view(panels, tiles, 8, 4, 4 * bits)[panel, :, row], bits).unflatten(-1, (2, 2, 2))
    values = torch.where(half.view(-1, *[1] * 6) == 0, both[..., 0], both[..., 1])
    return values.permute(0, 1, 3, 5, 6, 2, 4).reshape(panel.shape[0], tiles * _WIDE)


def _parameters(values: Tensor, panel: Tensor, place: Tensor) -> Tensor:
    """Scales or zero points of rows, ``[T, groups]``."""
    panels, groups, _ = values.shape
    return values.view(panels, groups, 8, 2)[panel, :, place % 8, place // 8]


def _spread(values: Tensor, packed: PackedWeight) -> Tensor:
    """Expand the parameters of groups to columns; a single one is left to broadcast."""
    count, groups = values.shape
    if groups == 1:
        return values
    columns = values.unsqueeze(-1).expand(count, groups, packed.group_size).reshape(count, groups * packed.group_size)
    return columns[:, : packed.k]
