"""What the quantised convolutions share: a convolution's sizes, and the checks before one is converted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from epiloq.nn.prepared_linear import FLOAT_DTYPES
from epiloq.nn.quantized_layer import QuantizedLayer
from epiloq.ops.conv2d import Geometry, Padding, Pair, geometry

Clamp = tuple[float, float]


def check_conv2d(name: str, conv: nn.Module) -> None:
    """Raise ValueError, from the class `name`, unless `conv` is a float ``nn.Conv2d`` with padding of zeros."""
    if not isinstance(conv, nn.Conv2d):
        raise ValueError(f"{name}: conv: expected a torch.nn.Conv2d, got {type(conv).__name__}")
    if isinstance(conv.weight, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name}: conv: its lazy weight has no shape yet; run the model once before quantising it")
    if conv.weight.dtype not in FLOAT_DTYPES:
        expected = ", ".join(map(str, FLOAT_DTYPES))
        raise ValueError(f"{name}: conv.weight: expected one of {expected}, got {conv.weight.dtype}")
    if conv.padding_mode != "zeros":
        raise ValueError(f"{name}: conv.padding_mode: expected zeros, got {conv.padding_mode}")


def padding_of(conv: nn.Conv2d) -> Padding:
    return conv.padding if isinstance(conv.padding, str) else cast(Sequence[int], conv.padding)


class QuantizedConv2d(QuantizedLayer):
    """The sizes of a convolution that is not trained."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair,
        padding: Padding,
        dilation: Pair,
        groups: int,
        clamp: Clamp | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        name = type(self).__name__
        self.in_channels, self.out_channels = in_channels, out_channels
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        self.kernel_size = (height, width)
        for argument, size in (("in_channels", in_channels), ("out_channels", out_channels), ("groups", groups)):
            if size < 1:
                raise ValueError(f"{name}: {argument}: expected at least 1, got {size}")
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{name}: groups: expected a divisor of {in_channels} and {out_channels} channels, got {groups}"
            )
        if clamp is not None and not clamp[0] <= clamp[1]:
            raise ValueError(f"{name}: clamp: expected lo <= hi, got {clamp}")
        self.geometry: Geometry = geometry(name, self.kernel_size, stride, padding, dilation, groups)
        self.clamp = clamp

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``[out_channels, in_channels / groups, Kh, Kw]``."""
        return self.out_channels, self.in_channels // self.geometry.groups, *self.kernel_size

    def _check_image(self, x: torch.Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"{type(self).__name__}: x: expected [B, {self.in_channels}, H, W], got {list(x.shape)}")

    def extra_repr(self) -> str:
        place = self.geometry
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={place.stride}, "
            f"padding={place.padding}, dilation={place.dilation}, groups={place.groups}, clamp={self.clamp}"
        )
