"""Integers, scales and offsets of GGUF blocks, for each kind of block whose values are on a regular grid.

Defined by ggml (``ggml-common.h``; ``ggml-quants.c``, ``dequantize_row_*``). A K-quant's scale is a float16 times an
integer of 4, 6 or 8 bits, at most 19 significant bits, so float32 represents it exactly; likewise an offset. Decoded
blocks dequantise to exactly ggml's float32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Decoded: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""``q`` [R, values of a block], ``scale`` and ``offset`` (or None) [R, groups of a block], of R blocks."""


@dataclass(frozen=True)
class Kind:
    """One kind of block.

    size, nbytes
        Values and bytes of a block.
    group
        Values that share a scale.
    low, high
        The integers' range: from 0 with offsets, otherwise signed.
    bits
        Bits of the integers in a `PackedWeight`, which does not support 5 or 6.
    offset
        Whether groups have offsets: ``W = scale * q + offset``.
    decode
        From uint8 ``[R, nbytes]``: integers (uint8 with offsets, else int8), float16 or float32 parameters.
    """

    size: int
    nbytes: int
    group: int
    low: int
    high: int
    bits: int
    offset: bool
    decode: Callable[[Tensor], Decoded]


def _half(block: Tensor, start: int) -> Tensor:
    """The float16 at a byte of each block, ``[R, 1]``."""
    return block[:, start : start + 2].contiguous().view(torch.float16)


def _fields(values: Tensor, shifts: range, mask: int, run: int) -> Tensor:
    """Bit fields of bytes ``[R, n]``: for each run of bytes, the fields at the first shift, then at the next."""
    by = torch.arange(shifts.start, shifts.stop, shifts.step, dtype=torch.uint8, device=values.device)
    runs = values.reshape(values.shape[0], -1, 1, run) >> by.view(1, 1, -1, 1)
    return (runs & mask).reshape(values.shape[0], -1)


_NIBBLES, _PAIRS, _BITS = range(0, 8, 4), range(0, 8, 2), range(8)


def _signed(q: Tensor, middle: int) -> Tensor:
    return q.view(torch.int8) - middle


def _q4_0(block: Tensor) -> Decoded:
    return _signed(_fields(block[:, 2:], _NIBBLES, 15, 16), 8), _half(block, 0), None


def _q4_1(block: Tensor) -> Decoded:
    return _fields(block[:, 4:], _NIBBLES, 15, 16), _half(block, 0), _half(block, 2)


def _five_bits(block: Tensor, start: int) -> Tensor:
    """The fifth bits are in one 32-bit word, least significant first."""
    by = torch.arange(8, dtype=torch.uint8, device=block.device)
    fifth = ((block[:, start : start + 4, None] >> by) & 1).reshape(block.shape[0], -1)
    return _fields(block[:, start + 4 :], _NIBBLES, 15, 16) | fifth << 4


def _q5_0(block: Tensor) -> Decoded:
    return _signed(_five_bits(block, 2), 16), _half(block, 0), None


def _q5_1(block: Tensor) -> Decoded:
    return _five_bits(block, 4), _half(block, 0), _half(block, 2)


def _q8_0(block: Tensor) -> Decoded:
    return block[:, 2:].contiguous().view(torch.int8), _half(block, 0), None


def _scaled(factor: Tensor, scales: Tensor) -> Tensor:
    """Multiply in float32, which is exact."""
    return factor.float() * scales.float()


def _q2_k(block: Tensor) -> Decoded:
    """16 bytes of scales and minima, 64 bytes of values, d, dmin."""
    scales, q = block[:, :16], _fields(block[:, 16:80], _PAIRS, 3, 32)
    return q, _scaled(_half(block, 80), scales & 15), -_scaled(_half(block, 82), scales >> 4)


def _q3_k(block: Tensor) -> Decoded:
    """32 bytes of third bits (4 is subtracted where they are 0), 64 bytes of the lower two, 12 bytes of scales, d."""
    q = _fields(block[:, 32:96], _PAIRS, 3, 32) | _fields(block[:, :32], _BITS, 1, 32) << 2
    low, high = _fields(block[:, 96:104], _NIBBLES, 15, 8), _fields(block[:, 104:108], _PAIRS, 3, 4)
    return _signed(q, 4), _scaled(_half(block, 108), _signed(low | high << 4, 32)), None


def _six_bits(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    first, second, third = scales.reshape(-1, 3, 4).unbind(1)
    scale = torch.cat((first & 63, third & 15 | first >> 2 & 48), 1)
    return scale, torch.cat((second & 63, third >> 4 | second >> 2 & 48), 1)


def _q4_k(block: Tensor) -> Decoded:
    """d, dmin, 12 bytes of scales and minima, 128 of values."""
    scale, least = _six_bits(block[:, 4:16])
    q = _fields(block[:, 16:], _NIBBLES, 15, 32)
    return q, _scaled(_half(block, 0), scale), -_scaled(_half(block, 2), least)


def _q5_k(block: Tensor) -> Decoded:
    """The same with 32 bytes of fifth bits before the values."""
    scale, least = _six_bits(block[:, 4:16])
    q = _fields(block[:, 48:], _NIBBLES, 15, 32) | _fields(block[:, 16:48], _BITS, 1, 32) << 4
    return q, _scaled(_half(block, 0), scale), -_scaled(_half(block, 2), least)


def _q6_k(block: Tensor) -> Decoded:
    """128 bytes of the lower four bits, 64 of the upper two, 16 signed scales, d."""
    q = _fields(block[:, :128], _NIBBLES, 15, 64) | _fields(block[:, 128:192], _PAIRS, 3, 32) << 4
    scales = block[:, 192:208].contiguous().view(torch.int8)
    return _signed(q, 32), _scaled(_half(block, 208), scales), None


KINDS: Mapping[str, Kind] = {
    "Q4_0": Kind(32, 18, 32, -8, 7, 4, False, _q4_0),
    "Q4_1": Kind(32, 20, 32, 0, 15, 4, True, _q4_1),
    "Q5_0": Kind(32, 22, 32, -16, 15, 8, False, _q5_0),
    "Q5_1": Kind(32, 24, 32, 0, 31, 8, True, _q5_1),
    "Q8_0": Kind(32, 34, 32, -128, 127, 8, False, _q8_0),
    "Q2_K": Kind(256, 84, 16, 0, 3, 2, True, _q2_k),
    "Q3_K": Kind(256, 110, 16, -4, 3, 3, False, _q3_k),
    "Q4_K": Kind(256, 144, 32, 0, 15, 4, True, _q4_k),
    "Q5_K": Kind(256, 176, 32, 0, 31, 8, True, _q5_k),
    "Q6_K": Kind(256, 210, 16, -32, 31, 8, False, _q6_k),
}
