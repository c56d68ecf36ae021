"""Random operands of the convolutions, for tests of their kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import epiloq
from reference import ulp

ARCHS = ("sm75", "sm80", "sm90")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def int8_arguments(
    image: tuple[int, int], kernel: tuple[int, int], channels: int, outputs: int, groups: int, batch: int = 2
) -> dict[str, Any]:
    x = torch.randint(-128, 128, (batch, *image, channels * groups), dtype=torch.int8)
    weight = torch.randint(-128, 128, (outputs * groups, *kernel, channels), dtype=torch.int8)
    n, terms = outputs * groups, channels * math.prod(kernel)
    spread = 5000 * terms**0.5
    return {
        "x_q": x,
        "weight": weight,
        "bias": torch.randn(n) * 20,
        "input_scale": 1.0,
        "input_zero": int(torch.randint(-128, 128, ())),
        "weight_scale": (torch.rand(n) + 0.1) / spread * 100,
        "groups": groups,
    }


def as_image(pixels: Tensor) -> Tensor:
    """``[B, H, W, C]`` as ``[B, C, H, W]`` in channels_last memory."""
    return pixels.permute(0, 3, 1, 2) if pixels.ndim == 4 else pixels


def conv2d_int8(x_q: Tensor, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
    """`epiloq.conv2d_int8` of pixels ``[B, H, W, C]``, as the references have them, giving such."""
    y = epiloq.conv2d_int8(as_image(x_q), *args, out=None if out is None else as_image(out), **kwargs)
    pixels = y.permute(0, 2, 3, 1)
    assert out is not None or pixels.is_contiguous()
    return pixels


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def where(stride: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    return {"stride": stride, "padding": padding, "dilation": dilation}


def assert_same(out: Tensor, expected: Tensor) -> None:
    """int8 exactly; floats within one unit in the last place, which float64 and float32 may round apart."""
    if expected.dtype == torch.int8:
        assert torch.equal(out.cpu(), expected)
        return
    limit = ulp(expected.double(), expected.dtype) + 2.0**-22 * 300
    assert ((out.cpu().double() - expected.double()).abs() <= limit).all()


def weight_only_arguments(
    image: tuple[int, int],
    kernel: tuple[int, int],
    channels: int,
    outputs: int,
    groups: int,
    kind: str,
    *,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    n, blocks = outputs * groups, -(-channels // group_size)
    per_channel = channels == 1
    shape = (n,) if per_channel else (n, *kernel, blocks)
    low = -(2 ** (bits - 1)) if kind == "symmetric" else 0
    weight = epiloq.pack_conv2d_weight(
        torch.randint(low, low + 2**bits, (n, *kernel, channels)),
        (torch.rand(shape) * 0.02 + 1e-3).half(),
        torch.randint(0, 2**bits, shape) if kind == "zero" else None,
        (torch.randn(shape) * 0.05).half() if kind == "offset" else None,
        bits=bits,
        group_size=group_size,
    )
    x = torch.randn(2, channels * groups, *image).to(dtype).contiguous(memory_format=torch.channels_last)
    return {"x": x, "weight": weight, "bias": torch.randn(n).to(dtype), "groups": groups}
