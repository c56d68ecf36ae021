"""PackedConv2dWeight: a convolution's low-bit weight, in blocks along the input channels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from epiloq._torch.calls import expect_tensors
from epiloq.weights.packed.dequantize import dequantize_weight
from epiloq.weights.packed.tensors import PackedTensors
from epiloq.weights.packed_weight import PackedWeight, pack_weight
from epiloq.weights.tensor_checks import refuse

# Columns that a kernel reads at once.
_CHUNK = 8
_SMALLEST_BLOCK = 32
# q, scale, zero, offset; and bits, n, kernel, channels, padded channels, group size.
Parts: TypeAlias = "tuple[Tensor, Tensor, Tensor | None, Tensor | None]"
Sizes: TypeAlias = "tuple[int, int, tuple[int, int], int, int, int]"


@dataclass(frozen=True, eq=False, repr=False)
class PackedConv2dWeight(PackedTensors):
    """A weight ``[Co, Kh, Kw, C]``, C = Ci / groups: ``scale * (q - zero)`` or ``scale * q + offset``.

    Made by `pack_conv2d_weight`. Like a `PackedWeight` it is immutable, and kernels may read it before the preceding
    kernel has finished. The layout (include/epiloq/conv2d_weight_only.h) is that of a `PackedWeight`
    ``[Co, Kh Kw Cp]``; depthwise weights (C = 1) have one byte per code, ``[Kh, Kw, Co]``.
    """

    TENSORS = ("q", "scale", "zero", "offset")

    q: Tensor
    scale: Tensor
    zero: Tensor | None
    offset: Tensor | None
    bits: int
    n: int
    kernel: tuple[int, int]
    channels: int
    padded_channels: int
    group_size: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.n, *self.kernel, self.channels))

    @property
    def depthwise(self) -> bool:
        return self.channels == 1

    @property
    def rows(self) -> PackedWeight:
        """The weight as a matrix ``[Co, Kh Kw Cp]`` that shares the tensors; not for depthwise weights."""
        columns = self.kernel[0] * self.kernel[1] * self.padded_channels
        return PackedWeight(
            self.q, self.scale, self.zero, self.offset, None, self.bits, self.n, columns, self.group_size
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantised weight for ``torch.nn.functional.conv2d``, ``[Co, C, Kh, Kw]``, in channels_last memory.

        Product and sum are each rounded to fp32, then to ``dtype``.
        """
        packed = (self.q, self.scale, self.zero, self.offset)
        sizes = (self.bits, self.n, self.kernel, self.channels, self.padded_channels, self.group_size)
        return dense_taps(packed, sizes, dtype)

    def __repr__(self) -> str:
        zeros = "symmetric" if self.zero is None and self.offset is None else "zero points"
        zeros = zeros if self.offset is None else "offsets"
        return (
            f"PackedConv2dWeight({list(self.shape)}, {self.bits} bits, group_size={self.group_size}, {zeros}, "
            f"{self.scale.dtype} scales, {self.device})"
        )


def dense_taps(packed: Parts, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """`PackedConv2dWeight.dequantize` for separate tensors and sizes, as passed to operators."""
    bits, n, (height, width), channels, padded, group_size = sizes
    if channels == 1:
        return _depthwise_taps(packed, bits, dtype)
    k = height * width * padded
    rows = dequantize_weight(*packed, bits, n, k, group_size, dtype)
    taps = rows.as_strided((n, channels, height, width), (k, 1, width * padded, padded))
    return taps.contiguous(memory_format=torch.channels_last)


def _depthwise_taps(packed: Parts, bits: int, dtype: torch.dtype) -> Tensor:
    q, scale, zero, offset = packed
    codes = q.to(torch.float32)
    if offset is not None:
        taps = codes * scale.float() + offset.float()
    else:
        taps = (codes - (float(1 << (bits - 1)) if zero is None else zero.float())) * scale.float()
    return taps.to(dtype).permute(2, 0, 1).unsqueeze(1).contiguous()


def block_of(group_size: int, kernel: tuple[int, int], channels: int) -> tuple[int, int]:
    """Return the group size in memory and the padded columns per tap for groups of ``group_size`` input channels."""
    if kernel == (1, 1) or channels == 1:
        return group_size, channels
    if group_size == -1:
        return -1, -(-channels // _CHUNK) * _CHUNK
    # A group longer than a tap becomes the next power of two, which kernels support.
    block = min(group_size, max(_SMALLEST_BLOCK, 1 << (channels - 1).bit_length()))
    return block, -(-channels // block) * block


def parameter_shape(group_size: int, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Shape of the scales that `pack_conv2d_weight` expects for a weight ``[Co, Kh, Kw, C]``."""
    n, kh, kw, channels = shape
    return (n,) if group_size == -1 or channels == 1 else (n, kh, kw, -(-channels // group_size))


def pack_conv2d_weight(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
) -> PackedConv2dWeight:
    """Pack the integers of a convolution's weight and their parameters.

    Args:
        q: any integer dtype ``[Co, Kh, Kw, Ci / groups]``: from -2^(bits-1) to 2^(bits-1) - 1 with neither ``zero`` nor
            ``offset``, from 0 to 2^bits - 1 with either.
        scale: float16, bfloat16 or float32 ``[Co, Kh, Kw, blocks]``, ``blocks = ceil(Ci / groups / group_size)``;
            ``[Co]`` with group_size -1 and for depthwise weights (``Ci / groups`` = 1).
        zero: integers in scale's shape, from 0 to 2^bits, or to 255 for 8 bits.
        offset: real offsets in scale's shape and dtype.
        bits: 2, 3, 4 or 8.
        group_size: input channels that share parameters, a multiple of 8; -1 for a whole output channel.

    Returns:
        The weight on q's device. Codes of depthwise weights, a small part of a network's, take a byte for any ``bits``.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
    """
    expect_tensors("pack_conv2d_weight", {"q": q, "scale": scale}, {"zero": zero, "offset": offset}, writes=False)
    if q.ndim != 4 or 0 in q.shape[1:]:
        refuse(
            "pack_conv2d_weight",
            "q",
            "[Co, Kh, Kw, Ci / groups] with at least one tap and one channel",
            f"{list(q.shape)}",
        )
    if type(group_size) is not int or (group_size != -1 and (group_size < 1 or group_size % _CHUNK)):
        refuse("pack_conv2d_weight", "group_size", f"-1 or a multiple of {_CHUNK}", repr(group_size))
    n, kh, kw, channels = q.shape
    shape = parameter_shape(group_size, (n, kh, kw, channels))
    for name, tensor in (("scale", scale), ("zero", zero), ("offset", offset)):
        if tensor is not None and tuple(tensor.shape) != shape:
            refuse("pack_conv2d_weight", name, f"{list(shape)}", f"{list(tensor.shape)}")
    parameters = [None if t is None else t.reshape(n, math.prod(shape[1:])) for t in (scale, zero, offset)]
    assert parameters[0] is not None
    if channels == 1:
        return _pack_taps(q, parameters[0], parameters[1], parameters[2], bits)
    block, padded = block_of(group_size, (kh, kw), channels)
    columns = pad(q, (0, padded - channels)).reshape(n, kh * kw * padded)
    rows = pack_weight(columns, parameters[0], parameters[1], parameters[2], bits=bits, group_size=block)
    return PackedConv2dWeight(
        rows.q, rows.scale, rows.zero, rows.offset, bits, n, (kh, kw), channels, padded, rows.group_size
    )


def _pack_taps(q: Tensor, scale: Tensor, zero: Tensor | None, offset: Tensor | None, bits: int) -> PackedConv2dWeight:
    n, kh, kw, _ = q.shape
    pack_weight(q.reshape(n, kh * kw), scale, zero, offset, bits=bits, group_size=-1)  # only for its checks
    codes = q.reshape(n, kh, kw).permute(1, 2, 0).to(torch.int16)
    if zero is None and offset is None:
        codes = codes + (1 << (bits - 1))
    small = [None if t is None else t.reshape(n).contiguous() for t in (scale, zero, offset)]
    assert small[0] is not None
    zero = None if small[1] is None else small[1].to(torch.uint8)
    codes = codes.to(torch.uint8).contiguous()
    return PackedConv2dWeight(codes, small[0], zero, small[2], bits, n, (kh, kw), 1, 1, -1)
