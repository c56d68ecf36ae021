"""The usual Triton kernel for float8 with scales per group, dense and grouped: a baseline, tuned by hand only.

Imported only for a CUDA device.
"""

# Triton is absent where mypy runs, untyped elsewhere, and refuses annotations that are not its own.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUP = 128
COLUMNS = 128
# (rows per expert at most, (tile rows, warps, stages))
TILES = ((16, (16, 4, 5)), (64, (64, 4, 4)), (1 << 30, (128, 8, 4)))
# Height in tiles of a band that is walked column by column, so that weights are read again from L2.
TOGETHER = tl.constexpr(8)


@triton.jit
def _expert_of(tile, offs, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a row tile (``experts`` if none), the tile's first row, and the end of the expert's rows."""
    e = tl.arange(0, EXPERTS)
    there = e < experts
    ends = tl.load(offs + e, mask=there, other=0)
    begins = tl.load(offs + e - 1, mask=there & (e > 0), other=0)
    tiles = tl.where(there, tl.cdiv(ends - begins, ROWS), 0)
    past = tl.cumsum(tiles, 0)
    expert = tl.sum((there & (past <= tile)).to(tl.int32))
    mine = e == expert
    first = tl.sum(tl.where(mine, begins + (tile - past + tiles) * ROWS, 0))
    return expert, first, tl.sum(tl.where(mine, ends, 0))


@triton.jit
def _multiply(
    a, b, scale_a, scale_b, out, offs, experts, n, k, a_row, sa_row, sa_group, sb_expert, sb_group, sb_block, row_tiles,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(n, COLUMNS)
    band, inside = tl.program_id(0) // (TOGETHER * column_tiles), tl.program_id(0) % (TOGETHER * column_tiles)
    height = min(TOGETHER, row_tiles - band * TOGETHER)
    column_tile = inside // height
    expert, first, end = _expert_of(band * TOGETHER + inside % height, offs, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    row, column = first + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, GROUP)
    a_at = a + row.to(tl.int64)[:, None] * a_row + lane[None, :]
    b_at = b + expert.to(tl.int64) * n * k + column.to(tl.int64)[None, :] * k + lane[:, None]
    sa_at = scale_a + row * sa_row
    sb_at = scale_b + expert * sb_expert + column_tile * sb_block
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for group in range(tl.cdiv(k, GROUP)):
        left = (row < end)[:, None]
        right = (column < n)[None, :]
        if not WHOLE:
            left &= (lane < k - group * GROUP)[None, :]
            right &= (lane < k - group * GROUP)[:, None]
        x = tl.load(a_at + group * GROUP, mask=left, other=0.0)
        w = tl.load(b_at + group * GROUP, mask=right, other=0.0)
        scale = tl.load(sa_at + group * sa_group, mask=row < end, other=0.0) * tl.load(sb_at + group * sb_group)
        sums += tl.dot(x, w) * scale[:, None]
    to = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < n)[None, :])


def grouped(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    """`epiloq.grouped_mm` to bf16: a ``[M, K]``, b ``[E, K, N]`` column-major, scale_b ``[E, K / 128, N / 128]``."""
    (rows, k), (experts, _, n) = a.shape, b.shape
    out = a.new_empty((rows, n), dtype=torch.bfloat16)
    height, warps, stages = next(tile for most, tile in TILES if rows <= most * experts)
    row_tiles = rows // height + experts  # upper bound: each expert may end in a partial tile
    strides = (a.stride(0), *scale_a.stride(), *scale_b.stride())
    _multiply[(row_tiles * triton.cdiv(n, COLUMNS),)](
        a, b, scale_a, scale_b, out, offs, experts, n, k, *strides, row_tiles,
        EXPERTS=triton.next_power_of_2(experts), ROWS=height, COLUMNS=COLUMNS, GROUP=GROUP, WHOLE=k % GROUP == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
