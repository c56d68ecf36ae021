"""Base class of the quantised convolutions: sizes, and checks before a conversion."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, conv_transpose2d, pad

from epiloq.nn.base.frozen import Frozen
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.quantized_layer import check_positive, convert_input
from epiloq.ops.convolutions.conv2d import Geometry, Padding, Pair, geometry
from epiloq.weights.computed import check_bias, check_finite, check_readable, refresh

Clamp = tuple[float, float]


def check_conv2d(name: str, conv: nn.Module) -> None:
    """Raise ValueError, for the class `name`, unless `conv` is a float ``nn.Conv2d``, finite and padded by zeros."""
    if not isinstance(conv, nn.Conv2d):
        raise ValueError(f"{name}: conv: expected a torch.nn.Conv2d, got {type(conv).__name__}")
    if isinstance(getattr(conv, "weight", None), nn.parameter.UninitializedParameter):
        raise ValueError(f"{name}: conv: its lazy weight has no shape yet; run the model once before quantising it")
    refresh(name, conv)
    check_readable(name, conv, "conv")
    sizes = (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
    if conv.weight.shape != sizes:
        raise ValueError(f"{name}: conv.weight: expected {list(sizes)}, got {list(conv.weight.shape)}")
    if conv.padding_mode != "zeros":
        raise ValueError(f"{name}: conv.padding_mode: expected zeros, got {conv.padding_mode}")
    check_bias(f"{name}: conv.bias", conv.bias, conv.out_channels, conv.weight.device)
    check_finite(f"{name}: conv.weight", conv.weight)


def padding_of(conv: nn.Conv2d) -> Padding:
    return conv.padding if isinstance(conv.padding, str) else cast(Sequence[int], conv.padding)


class QuantizedConv2d(Frozen):
    """Base class of convolutions with frozen weights, with their sizes."""

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
        check_positive(name, in_channels=in_channels, out_channels=out_channels, groups=groups)
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

    @abstractmethod
    def _taps(self, *tensors: Any) -> Tensor:
        """The weight in float32, ``[out_channels, in_channels / groups, Kh, Kw]``."""

    def _spread(self, bias: Tensor) -> Tensor:
        return bias.view(-1, 1, 1)

    def _gather(self, dy: Tensor) -> Tensor:
        return dy.sum((0, 2, 3))

    def _push(self, x: Tensor, *tensors: Any) -> Tensor:
        place, dtype = self.geometry, _dtype_of(x)
        top, bottom, left, right = place.padding
        image = pad(x.to(dtype), (left, right, top, bottom))
        taps = self._taps(*tensors).to(dtype)
        return conv2d(image, taps, None, place.stride, 0, place.dilation, place.groups).to(x.dtype)

    def _pull(self, dy: Tensor, shape: torch.Size, *tensors: Any) -> Tensor:
        place, dtype = self.geometry, _dtype_of(dy)
        top, bottom, left, right = place.padding
        height, width = shape[2:]
        reach = [d * (k - 1) + 1 for d, k in zip(place.dilation, self.kernel_size, strict=True)]
        # Pixels at the borders that no kernel position covers.
        rest = [
            (size - reach[i]) % place.stride[i] for i, size in enumerate((height + top + bottom, width + left + right))
        ]
        taps = self._taps(*tensors).to(dtype)
        whole = conv_transpose2d(dy.to(dtype), taps, None, place.stride, 0, rest, place.groups, place.dilation)
        return whole[:, :, top : top + height, left : left + width].to(dy.dtype)

    def forward(self, input: Tensor) -> Tensor:
        if is_symbolic(input):
            return as_leaf(self, input)
        x = convert_input(self, input)
        if x.ndim not in (3, 4) or x.shape[-3] != self.in_channels:
            channels = self.in_channels
            raise ValueError(
                f"{type(self).__name__}: x: expected [B, {channels}, H, W] or [{channels}, H, W], got {list(x.shape)}"
            )
        return self._of_images(x) if x.ndim == 4 else self._of_images(x.unsqueeze(0)).squeeze(0)

    @abstractmethod
    def _of_images(self, x: Tensor) -> Tensor:
        """The output of a batch of images."""

    def extra_repr(self) -> str:
        place = self.geometry
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={place.stride}, "
            f"padding={place.padding}, dilation={place.dilation}, groups={place.groups}, clamp={self.clamp}"
        )


def _dtype_of(x: Tensor) -> torch.dtype:
    """The type in which torch's convolutions compute: float32 on a CPU."""
    return x.dtype if x.is_cuda else torch.float32
