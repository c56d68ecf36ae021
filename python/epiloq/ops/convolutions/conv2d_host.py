"""Sums of int8 convolutions on the CPU: exact, by torch's int8 product where the CPU's is exact."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from epiloq import _core
from epiloq._torch.threads import threads_for
from epiloq.ops.convolutions.conv2d import Geometry

# Bytes of a matrix of patches at a time, which second-level caches of a few cores keep.
_PATCHES = 1 << 20
# Products of two int8 that add up to at most 2^24, up to where fp32 holds every integer.
_EXACT_TERMS = (1 << 24) // (128 * 128)


def blocks_of_sums(
    x: Tensor, weight: Tensor, input_zero: int, geometry: Geometry, size: tuple[int, int]
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the output, counted over all images, and their sums int32 ``[rows, Q, Co]`` with padding of
    ``input_zero``, a block of rows at a time."""
    if geometry.groups > 1:
        acc = _grouped(x, weight, input_zero, geometry)
        yield slice(0, x.shape[0] * size[0]), acc.flatten(0, 1)
        return
    columns = weight.flatten(1).t()
    for rows, patches in _blocks_of_patches(x, weight, input_zero, geometry, size):
        yield rows, exact_int_mm(patches, columns).view(-1, size[1], weight.shape[0])


def exact_int_mm(a: Tensor, b: Tensor) -> Tensor:
    """int8 ``[M, K] @ [K, N]`` on the CPU as exact int32: oneDNN's product of many rows, where it is exact."""
    # With K = 1 torch 2.13 misreads the strides of a column-major b.
    if a.shape[1] > 1 and _int_mm_is_exact():
        return torch._int_mm(a, b)
    acc = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.int32)
    _core.multiply_int8(acc, a.contiguous(), b.t().contiguous(), threads_for(a))
    return acc


@cache
def _int_mm_is_exact() -> bool:
    """Whether this CPU's int8 product is exact: without VNNI, oneDNN saturates sums of two products to int16."""
    a = torch.full((64, 64), 127, dtype=torch.int8, device="cpu")
    b = a.clone()
    return bool((torch._int_mm(a, b) == 64 * 127 * 127).all())


def describe_int_mm() -> str:
    """Name of the routine that `exact_int_mm` uses here."""
    return "torch._int_mm (oneDNN)" if _int_mm_is_exact() else "epiloq's int8 products"


def _blocks_of_patches(
    x: Tensor, weight: Tensor, input_zero: int, geometry: Geometry, size: tuple[int, int]
) -> Iterator[tuple[slice, Tensor]]:
    """Matrices of patches: of some rows of an image, or of whole images where those are small."""
    views = _patches(x, weight.shape[1:3], input_zero, geometry, size)
    images, p = views.shape[:2]
    rows = max(1, _PATCHES // views[0, 0].numel())
    at_once = max(1, rows // p)
    for image in range(0, images, at_once):
        of_images = views[image : image + at_once]
        for row in range(0, p, rows):
            block = of_images[:, row : row + rows]
            first = image * p + row
            # Copied, since torch's product does not support the overlapping rows of a view.
            patches = block.reshape(-1, weight[0].numel()).contiguous()
            yield slice(first, first + block.shape[0] * block.shape[1]), patches


def _patches(x: Tensor, kernel: torch.Size, input_zero: int, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """``[B, P, Q, Kh, Kw, Ci]``, a view of the padded image."""
    top, bottom, left, right = geometry.padding
    padded = pad(x, (0, 0, left, right, top, bottom), value=input_zero) if any(geometry.padding) else x
    image, row, pixel, channel = padded.stride()
    (down, across), (apart_h, apart_w) = geometry.stride, geometry.dilation
    return padded.as_strided(
        (x.shape[0], *size, *kernel, x.shape[3]),
        (image, row * down, pixel * across, row * apart_h, pixel * apart_w, channel),
    )


def _grouped(x: Tensor, weight: Tensor, input_zero: int, geometry: Geometry) -> Tensor:
    """Uses torch's float convolution (direct, not Winograd), in which every partial sum is an exact integer.

    bfloat16 represents int8 too, so torch's faster modes for float32 do not change the result.
    """
    top, bottom, left, right = geometry.padding
    dtype = torch.float32 if weight[0].numel() <= _EXACT_TERMS else torch.float64
    image = pad(x, (0, 0, left, right, top, bottom), value=input_zero).to(dtype).permute(0, 3, 1, 2)
    taps = weight.to(dtype).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", enabled=False):
        sums = conv2d(image, taps, None, geometry.stride, 0, geometry.dilation, geometry.groups)
    return sums.permute(0, 2, 3, 1).to(torch.int32).contiguous()
