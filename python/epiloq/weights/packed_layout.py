"""Memory order of a packed weight; src/problems/packed_layout.h describes it and gives the reasons.

Row ``8 r + g`` of a panel; column ``16 i + 8 p + 2 t + e`` of a tile, or ``32 b + 8 t + c`` with 2 and 3 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows per panel; K is padded to a multiple of PADDING.
PANEL_ROWS, PADDING = 16, 128
_PANELS_AT_ONCE = 64


def groups_of(k: int, group_size: int) -> int:
    """Number of groups in ``k`` columns."""
    return int(k > 0) if group_size == -1 else -(-k // group_size)


def shapes_of(bits: int, n: int, k: int, group_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the packed tensors."""
    panels, padded = -(-n // PANEL_ROWS), -(-k // PADDING) * PADDING
    depth, lane_bytes = (32, 16) if bits == 8 else (64, 4 * bits)
    parameters = (panels, groups_of(padded, min(group_size, max(padded, 1))), PANEL_ROWS)
    names = dict.fromkeys(("scale", "zero", "offset"), parameters)
    return {"q": (panels, padded // depth, 32, lane_bytes), **names, "perm": (k,)}


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
    values = rows.view(panels, 2, 8, tiles, 2, 4, 8).permute(0, 3, 2, 5, 1, 4, 6)  # s tile g t r b c
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    planes = [((values >> plane & 1) << places).sum(-1, dtype=torch.uint8) for plane in range(bits)]
    return torch.stack([plane.flatten(-2) for plane in planes], dim=-2).reshape(shape)


def codes_of(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `packed_codes`, including padding."""
    panels, tiles = packed.shape[:2]
    rows, columns = panels * PANEL_ROWS, tiles * (32 if bits == 8 else 64)
    if bits == 8:
        in_order = packed.view(panels, tiles, 8, 4, 2, 2, 2, 2).permute(0, 6, 2, 1, 4, 5, 3, 7)
        return in_order.reshape(rows, columns)
    if bits == 4:
        pairs = packed.view(panels, tiles, 8, 4, 4, 2, 2).permute(0, 2, 1, 4, 6, 3, 5).reshape(panels, 8, columns)
        return torch.stack((pairs & 15, pairs >> 4), dim=1).view(rows, columns)
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    planes = packed.view(panels, tiles, 8, 4, bits, 2, 2, 1) >> places & 1  # s tile g t plane r b c
    values = sum((planes.select(4, plane) << plane for plane in range(1, bits)), planes.select(4, 0))
    return values.permute(0, 4, 2, 1, 5, 3, 6).reshape(rows, columns)


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
