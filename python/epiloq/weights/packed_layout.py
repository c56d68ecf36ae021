"""Memory order of a packed weight; src/problems/packed_layout.h describes it and gives the reasons.

Row ``8 r + g`` of a panel; column ``16 i + 8 p + 2 t + e`` of a tile. With 2 and 3 bits i is ``2 b + f``, and pair
``4 f + 2 p + r`` of a block b has columns ``e`` (src/problems/narrow_codes.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows per panel; K is padded to a multiple of PADDING.
PANEL_ROWS, PADDING = 16, 128
_PANELS_AT_ONCE = 64


def depth_of(bits: int) -> int:
    """Columns of a tile."""
    return 32 if bits == 8 else 64


def parameter_of(row: int) -> int:
    """Index, among the scales or zero points of a panel's group, of a row of the panel."""
    return row % 8 * 2 + row // 8


def groups_of(k: int, group_size: int) -> int:
    """Number of groups in ``k`` columns."""
    return int(k > 0) if group_size == -1 else -(-k // group_size)


def shapes_of(bits: int, n: int, k: int, group_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the packed tensors."""
    panels, padded = -(-n // PANEL_ROWS), -(-k // PADDING) * PADDING
    lane_bytes = 16 if bits == 8 else 4 * bits
    parameters = (panels, groups_of(padded, min(group_size, max(padded, 1))), PANEL_ROWS)
    names = dict.fromkeys(("scale", "zero", "offset"), parameters)
    return {"q": (panels, padded // depth_of(bits), 32, lane_bytes), **names, "perm": (k,)}


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Convert uint8 ``[N, K]`` to the kernels' order, padded."""
    n, k = codes.shape
    padded_n, padded_k = -(-n // PANEL_ROWS) * PANEL_ROWS, -(-k // PADDING) * PADDING
    if (n, k) != (padded_n, padded_k):
        codes = torch.nn.functional.pad(codes, (0, padded_k - k, 0, padded_n - n))
    shape = shapes_of(bits, n, k, -1)["q"]
    panels, tiles = shape[:2]
    if bits == 8:
        in_order = codes.view(panels, 2, 8, tiles, 2, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 1, 7)  # s tile g t i p r e
        return in_order.reshape(shape)
    rows = codes.view(panels, 2, 8, padded_k)
    if bits == 4:
        pairs = rows[:, 0] | rows[:, 1] << 4
        return pairs.view(panels, 8, tiles, 4, 2, 4, 2).permute(0, 2, 1, 5, 3, 6, 4).reshape(shape)  # s tile g t i e p
    in_order = rows.view(panels, 2, 8, tiles, 2, 2, 2, 4, 2).permute(0, 3, 2, 7, 4, 8, 5, 6, 1)  # s tile g t b e f p r
    return _narrow_lanes(in_order.flatten(-3), bits).reshape(shape)


def codes_of(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `packed_codes`, including padding."""
    panels, tiles = packed.shape[:2]
    rows, columns = panels * PANEL_ROWS, tiles * depth_of(bits)
    if bits == 8:
        in_order = packed.view(panels, tiles, 8, 4, 2, 2, 2, 2).permute(0, 6, 2, 1, 4, 5, 3, 7)
        return in_order.reshape(rows, columns)
    if bits == 4:
        pairs = packed.view(panels, tiles, 8, 4, 4, 2, 2).permute(0, 2, 1, 4, 6, 3, 5).reshape(panels, 8, columns)
        return torch.stack((pairs & 15, pairs >> 4), dim=1).view(rows, columns)
    values = narrow_values(packed, bits).view(panels, tiles, 8, 4, 2, 2, 2, 2, 2)  # s tile g t b e f p r
    return values.permute(0, 8, 2, 1, 4, 6, 7, 3, 5).reshape(rows, columns)


def _narrow_lanes(values: Tensor, bits: int) -> Tensor:
    """Bytes ``[..., 4 bits]`` of lanes from their values of 2 or 3 bits ``[..., block, column, pair]``."""
    v = values.unbind(-1)
    if bits == 2:
        return torch.stack([v[i] | v[i + 1] << 2 | v[i + 2] << 4 | v[i + 3] << 6 for i in (0, 4)], dim=-1).flatten(-3)
    own = torch.stack((v[0] | v[1] << 3 | (v[2] & 3) << 6, v[2] >> 2 | v[3] << 1 | v[4] << 4 | (v[7] & 1) << 7), dim=-1)
    shared = v[5] | v[6] << 3 | v[7] >> 1 << 6
    return torch.cat((own.flatten(-3), shared.transpose(-1, -2).flatten(-2)), dim=-1)


def narrow_values(lanes: Tensor, bits: int) -> Tensor:
    """Values of 2 or 3 bits ``[..., block, column, pair]`` of lanes from their bytes ``[..., 4 bits]``."""
    low, high = lanes[..., :8].unflatten(-1, (2, 2, 2)).unbind(-1)  # of a block's and column's 16 bits
    if bits == 2:
        return torch.stack([byte >> shift & 3 for byte in (low, high) for shift in (0, 2, 4, 6)], dim=-1)
    shared = lanes[..., 8:].unflatten(-1, (2, 2)).transpose(-1, -2)
    pairs = (low, low >> 3, low >> 6 | high << 2, high >> 1, high >> 4)
    return torch.stack((*pairs, shared, shared >> 3, high >> 7 | shared >> 6 << 1), dim=-1) & 7


def recoded(packed: Tensor, bits: int, to_bits: int, shape: tuple[int, int], symmetric: bool) -> Tensor:
    """Convert packed codes of a weight ``[N, K]`` to another number of bits with the same integers.

    Codes of a symmetric weight are relative to the middle. Raises ValueError if an integer does not fit.
    """
    shift = (1 << (to_bits - 1)) - (1 << (bits - 1)) if symmetric else 0
    (n, k), found = shape, []
    for number, part in enumerate(packed.split(_PANELS_AT_ONCE)):
        rows = n - number * _PANELS_AT_ONCE * PANEL_ROWS
        codes = codes_of(part, bits)[:rows, :k].to(torch.int16) + shift
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << to_bits:
            raise ValueError(f"expected integers that fit {to_bits} bits, got larger ones")
        found.append(packed_codes(codes.to(torch.uint8), to_bits))
    return torch.cat(found) if found else packed.new_empty(shapes_of(to_bits, n, k, -1)["q"])


def packed_parameters(values: Tensor, groups: int) -> Tensor:
    """Convert ``[N, given]`` to ``[panels, groups, 16]``, padded with zeros."""
    n, given = values.shape
    panels = -(-n // PANEL_ROWS)
    padded = torch.nn.functional.pad(values, (0, groups - given, 0, panels * PANEL_ROWS - n))
    return padded.view(panels, 2, 8, groups).permute(0, 3, 2, 1).reshape(panels, groups, PANEL_ROWS)


def parameters_of(packed: Tensor) -> Tensor:
    """Inverse of `packed_parameters`, including padding."""
    panels, groups, _ = packed.shape
    return packed.view(panels, groups, 8, 2).permute(0, 3, 2, 1).reshape(panels * PANEL_ROWS, groups)


def parameters_by_group(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The transpose of `parameters_of`, contiguous ``[groups, panels * 16]`` of another type, in one copy."""
    panels, groups, _ = packed.shape
    by_group = packed.new_empty((groups, panels, 2, 8), dtype=dtype)
    return by_group.copy_(packed.view(panels, groups, 8, 2).permute(1, 0, 3, 2)).view(groups, panels * PANEL_ROWS)
