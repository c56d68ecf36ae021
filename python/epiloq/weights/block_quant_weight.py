"""Weights quantised in blocks along K, in the layout of `online_quant_mm`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Kernels step through K by this many values.
K_MULTIPLE = 128
# Rows of parameters start at multiples of 16 bytes.
N_MULTIPLE = 4
# Values of a row that share 16 bytes at 4 bits: byte b holds value b and, in its high half, value b + 16.
PACKED_SPAN = 32

RANGES = {4: (-8, 7), 8: (-128, 127)}


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_blocks(k: int, group_size: int) -> int:
    """Number of blocks with parameters; K is rounded up if a kernel's K step contains whole blocks."""
    return -(-(round_up(k, K_MULTIPLE) if K_MULTIPLE % group_size == 0 else k) // group_size)


@dataclass(frozen=True, eq=False)
class BlockQuantWeight:
    """An immutable weight ``[N, K]`` of about ``scale * q + offset``; made by ``epiloq.online_quant_weight``.

    ``values`` is int8 ``[N, K rounded up to 128]`` (for 4 bits half as wide: 32 values take 16 bytes, with value b in
    the low half of byte b and value b + 16 in its high half). ``parameters`` is float32
    ``[blocks, 2 or 3, N rounded up to 4]``: a block's scale, the sum of its dequantised values, and its offset if the
    weight has offsets. Both are padded with zeros.
    """

    values: Tensor
    parameters: Tensor
    out_features: int
    in_features: int
    group_size: int
    bits: int

    @property
    def blocks(self) -> int:
        """G = ceil(K / group_size)."""
        return -(-self.in_features // self.group_size)

    @property
    def scale(self) -> Tensor:
        """float32 ``[N, G]``, a view."""
        return self._parameter(0)

    @property
    def offset(self) -> Tensor | None:
        """float32 ``[N, G]``, a view; None for a weight without offsets."""
        return self._parameter(2) if self.parameters.shape[1] == 3 else None

    def _parameter(self, index: int) -> Tensor:
        return self.parameters[: self.blocks, index, : self.out_features].t()

    @property
    def nbytes(self) -> int:
        """Size of values and parameters in bytes, including padding."""
        return self.values.nbytes + self.parameters.nbytes

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copies of the original tensors: ``q`` int8 ``[N, K]``, ``scale`` and ``offset`` float32 ``[N, G]`` (or
        None)."""
        q = widen(self.values) if self.bits == 4 else self.values
        scale, offset = (
            None if t is None else t.clone(memory_format=torch.contiguous_format) for t in (self.scale, self.offset)
        )
        assert scale is not None
        return q[:, : self.in_features].clone(memory_format=torch.contiguous_format), scale, offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``scale * q + offset`` as ``[N, K]``, computed in float32."""
        q, scale, offset = self.unpack()
        spread = scale.repeat_interleave(self.group_size, 1)[:, : self.in_features]
        weight = q.to(torch.float32) * spread
        if offset is not None:
            weight += offset.repeat_interleave(self.group_size, 1)[:, : self.in_features]
        return weight.to(dtype)

    def to(self, device: torch.device | str) -> BlockQuantWeight:
        """The same weight on another device."""
        return replace(self, values=self.values.to(device), parameters=self.parameters.to(device))


def narrow(q: Tensor) -> Tensor:
    """Convert 4-bit values in int8 ``[N, Kp]`` to the kernels' half-wide layout."""
    n, k = q.shape
    low, high = q.view(n, k // PACKED_SPAN, 2, PACKED_SPAN // 2).view(torch.uint8).unbind(2)
    return ((low & 15) | (high << 4)).view(torch.int8).reshape(n, k // 2)


def widen(packed: Tensor) -> Tensor:
    """Inverse of `narrow`."""
    n, width = packed.shape
    halves = packed.view(n, 2 * width // PACKED_SPAN, 1, PACKED_SPAN // 2)
    return torch.cat(((halves << 4) >> 4, halves >> 4), 2).reshape(n, 2 * width)


def unpack_pairs(packed: Tensor, k: int) -> Tensor:
    """Unpack int8 ``[N, ceil(K / 2)]`` to ``[N, K]``: the low half of byte i is value 2i, its high half 2i + 1."""
    return torch.stack(((packed << 4) >> 4, packed >> 4), -1).reshape(packed.shape[0], 2 * packed.shape[1])[:, :k]


def pack_pairs(q: Tensor) -> Tensor:
    """Inverse of `unpack_pairs`, for int8 ``[N, K]`` with values from -8 to 7."""
    even = torch.nn.functional.pad(q, (0, q.shape[1] % 2)).view(torch.uint8)
    return ((even[:, ::2] & 15) | (even[:, 1::2] << 4)).view(torch.int8)


def prepare(q: Tensor, scale: Tensor, offset: Tensor | None, group_size: int, bits: int) -> BlockQuantWeight:
    """Create the weight from int8 ``q [N, K]`` and float32 ``[N, G]`` parameters, which were checked."""
    n, k = q.shape
    blocks = scale.shape[1]
    by_block = torch.nn.functional.pad(q, (0, blocks * group_size - k)).view(n, blocks, group_size)
    # The sum of a block's dequantised values is computed in float64 and rounded once.
    total = by_block.sum(2, dtype=torch.int64) * scale.double()
    if offset is not None:
        count = torch.full_like(offset, group_size, dtype=torch.float64)
        count[:, -1:] = k - (blocks - 1) * group_size
        total += count * offset.double()
    rows = [scale, total.to(torch.float32), *(() if offset is None else (offset,))]
    parameters = scale.new_zeros((padded_blocks(k, group_size), len(rows), round_up(n, N_MULTIPLE)))
    for i, row in enumerate(rows):
        parameters[:blocks, i, :n] = row.t()
    values = q.new_zeros((n, round_up(k, K_MULTIPLE)))
    values[:, :k] = q
    return BlockQuantWeight(narrow(values) if bits == 4 else values, parameters, n, k, group_size, bits)
