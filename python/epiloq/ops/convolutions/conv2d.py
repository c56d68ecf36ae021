"""Geometry shared by the convolutions: how a kernel moves over an image."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_compiling

from epiloq._torch.checks import is_int32
from epiloq.weights.tensor_checks import refuse

Pair: TypeAlias = "int | Sequence[int]"
Padding: TypeAlias = "int | str | Sequence[int]"
_INTEGER = "an integer below 2^31"


class Geometry(NamedTuple):
    """Numbers in the order of the operators' schemas; padding is top, bottom, left, right."""

    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int

    def output_size(self, image: Sequence[Any], kernel: Sequence[int]) -> tuple[Any, Any]:
        """Height and width of the output, 0 or less if the kernel does not fit (checked in C++)."""
        (down, right), (top, bottom, left, far), (tall, wide), _ = self
        p = (image[0] + top + bottom - tall * (kernel[0] - 1) - 1) // max(down, 1) + 1
        q = (image[1] + left + far - wide * (kernel[1] - 1) - 1) // max(right, 1) + 1
        return p, q


def geometry(
    operation: str, kernel: Sequence[int], stride: Pair, padding: Padding, dilation: Pair, groups: int
) -> Geometry:
    """`padding`: one number, (height, width), (top, bottom, left, right), "valid" or, with unit strides, "same"."""
    strides = _pair(operation, "stride", stride)
    dilations = _pair(operation, "dilation", dilation)
    if not is_int32(groups):
        refuse(operation, "groups", _INTEGER, repr(groups))
    return Geometry(strides, _sides(operation, padding, kernel, strides, dilations), dilations, groups)


def _sides(
    operation: str, padding: Padding, kernel: Sequence[int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    if is_int32(padding):  # the common case first: every call comes here
        return padding, padding, padding, padding
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        if stride != (1, 1):
            refuse(operation, "padding", '"same" with unit strides alone', f"strides {stride}")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        top, left = total[0] // 2, total[1] // 2
        return top, total[0] - top, left, total[1] - left
    if _integers(padding, 4):
        top, bottom, left, right = padding
        return top, bottom, left, right
    height, width = _pair(operation, "padding", padding, f'{_INTEGER}, two, four, "same" or "valid"')
    return height, height, width, width


def _pair(operation: str, argument: str, value: object, expected: str = f"{_INTEGER}, or two") -> tuple[int, int]:
    if is_int32(value):
        return value, value
    if not _integers(value, 2):
        refuse(operation, argument, expected, repr(value))
    return value[0], value[1]


def _integers(values: object, count: int) -> TypeGuard[Sequence[int]]:
    if not isinstance(values, Sequence) or len(values) != count:
        return False
    return all(map(is_int32, values))


def check_output(operation: str, out: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless a caller's output is an image of this shape in channels_last memory.

    C++, which sees its pixels as rows, would name their order and recommend contiguous().
    """
    if out.ndim != 4:
        refuse(operation, "out", "[B, Co, P, Q]", list(out.shape))
    if out.shape != torch.Size(shape) and min(shape[2:]) > 0:  # C++ names the side that a kernel does not fit
        refuse(operation, "out", list(shape), list(out.shape))
    if out.shape[1] > 1 and out.stride(1) != 1:
        got = (
            f"{list(out.shape)} with strides {list(out.stride())}; take .contiguous(memory_format=torch.channels_last)"
        )
        refuse(operation, "out", "channels_last memory (stride 1 in the channels)", got)


def is_written_by_copy(out: Tensor | None) -> bool:
    """Whether an output is copied to: Dynamo refuses operators that write an image in channels_last memory."""
    return out is not None and is_compiling() and not out.is_contiguous()


def copied(operation: str, result: Tensor, out: Tensor) -> Tensor:
    """`out` with a result copied to it. Raises ValueError as the operation itself."""
    check_output(operation, out, result.shape)
    return out.copy_(result)


def check_sizes(operation: str, argument: str, x: Tensor, channels: int) -> None:
    """Raise ValueError for another number of channels or an image without pixels.

    C++ would name the sizes with channels last.
    """
    if x.shape[1] != channels:
        refuse(operation, argument, f"{channels} channels (those of the weight in every group)", list(x.shape))
    if x.shape[2] < 1 or x.shape[3] < 1:
        refuse(operation, argument, "an image of at least one pixel", list(x.shape))


def check_input(operation: str, argument: str, x: Tensor, dtypes: Collection[torch.dtype]) -> None:
    """Raise ValueError unless an input is an image of one of some types, with the shape that the caller gave it."""
    if x.ndim != 4:
        refuse(operation, argument, "[B, Ci, H, W]", list(x.shape))
    if x.dtype not in dtypes:
        refuse(operation, argument, " or ".join(map(str, dtypes)), f"{x.dtype} {list(x.shape)}")
