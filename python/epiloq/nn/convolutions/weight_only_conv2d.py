"""WeightOnlyConv2d: a convolution with a low-bit weight and floating-point activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn.base.packed_linear import check_grid, kind_of_zeros, nearest
from epiloq.nn.convolutions.conv2d import Clamp, QuantizedConv2d, check_conv2d, padding_of
from epiloq.weights.computed import check_bias
from epiloq.weights.packed_conv2d_weight import PackedConv2dWeight, pack_conv2d_weight, parameter_shape

_PARTS = ("q", "scale", "zero", "offset")
_STORED = ("weight_q", "bias", "weight_scale", "weight_zero", "weight_offset")


class WeightOnlyConv2d(QuantizedConv2d):
    """``y = clamp(conv2d(x, W) + bias)`` with weights of 2, 3, 4 or 8 bits, see ``epiloq.conv2d_weight_only``.

    `x` is ``[B, in_channels, H, W]`` in float32, float16 or bfloat16, preferably in channels_last memory; `y` is ``[B,
    out_channels, P, Q]`` in the dtype of `x` and channels_last memory. Made by `from_conv2d` or `from_packed`.

    Parameters without gradients, which form the state dict: `weight_q`, `weight_scale` and, if present, `weight_zero`
    and `weight_offset`, as described for ``epiloq.PackedConv2dWeight``; `bias` ``[out_channels]`` of the layer's
    float dtype, the only parameter that ``.to(dtype)`` converts. `packed` is these as a value, `weight` the
    dequantised weight, computed on access.
    """

    weight_q: Tensor
    weight_scale: Tensor
    weight_zero: Tensor | None
    weight_offset: Tensor | None
    bias: Tensor | None
    bits: int
    group_size: int
    padded_channels: int

    @classmethod
    def from_packed(
        cls,
        weight: PackedConv2dWeight,
        bias: Tensor | None = None,
        *,
        stride: int | tuple[int, int] = 1,
        padding: Any = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        clamp: Clamp | None = None,
    ) -> WeightOnlyConv2d:
        """Create a layer with the tensors of a packed weight ``[out_channels, Kh, Kw, in_channels / groups]``."""
        check_bias("WeightOnlyConv2d: bias", bias, weight.n, weight.device)
        layer = cls(weight.channels * groups, weight.n, weight.kernel, stride, padding, dilation, groups, clamp)
        layer._dtype = weight.scale.dtype
        layer.bits, layer.group_size, layer.padded_channels = weight.bits, weight.group_size, weight.padded_channels
        for name in _PARTS:
            layer._store(f"weight_{name}", getattr(weight, name))
        layer._store("bias", None if bias is None else bias.detach().clone())
        return layer

    @classmethod
    @torch.no_grad()
    def from_conv2d(
        cls, conv: nn.Conv2d, *, bits: int = 4, group_size: int = -1, zeros: str = "none", clamp: Clamp | None = None
    ) -> WeightOnlyConv2d:
        """Round `conv` (which is not changed) to the nearest grid of each block of input channels, on its device.

        Rounds as `WeightOnlyLinear.from_linear`. With group_size -1, and for depthwise convolutions, there is one
        scale per output channel.

        Raises ValueError unless `conv` is a float ``nn.Conv2d`` with zero padding and zeros is "none" or "zero".
        """
        cls.check_convertible(conv)
        check_grid("WeightOnlyConv2d", bits, group_size, zeros)
        rounded = nearest_blocks(conv.weight.permute(0, 2, 3, 1), bits, group_size, zeros == "none")
        return cls.from_packed(
            pack_conv2d_weight(*rounded, bits=bits, group_size=group_size),
            conv.bias,
            stride=conv.stride,  # type: ignore[arg-type]
            padding=padding_of(conv),
            dilation=conv.dilation,  # type: ignore[arg-type]
            groups=conv.groups,
            clamp=clamp,
        ).train(conv.training)

    @staticmethod
    def check_convertible(conv: nn.Module, **options: Any) -> None:
        """Raise ValueError unless ``from_conv2d`` supports `conv`."""
        check_conv2d("WeightOnlyConv2d", conv)

    @property
    def zeros(self) -> str:
        """ "none", "zero" or "offset": kind of zero points."""
        return kind_of_zeros(self)

    @property
    def packed(self) -> PackedConv2dWeight:
        """The weight as a value that shares the parameters' memory."""
        return self._value(*self._all_stored(_STORED))

    def _of_images(self, x: Tensor) -> Tensor:
        return self._call(x, self._all_stored(_STORED))

    def _value(self, *tensors: Any) -> PackedConv2dWeight:
        q, _, scale, zero, offset = tensors
        channels = self.in_channels // self.geometry.groups
        sizes = (self.out_channels, self.kernel_size, channels, self.padded_channels, self.group_size)
        return PackedConv2dWeight(q, scale, zero, offset, self.bits, *sizes)

    def _taps(self, *tensors: Any) -> Tensor:
        return self._value(*tensors).dequantize()

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        bias, place = tensors[1], self.geometry
        return epiloq.conv2d_weight_only(
            x,
            self._value(*tensors),
            None if bias is None else bias.to(x.dtype),
            stride=place.stride,
            padding=place.padding,
            dilation=place.dilation,
            groups=place.groups,
            clamp=self.clamp,
        )

    @property
    def weight_bytes(self) -> int:
        """Size of the quantised weight in memory, in bytes: integers with padding, scales, zero points."""
        return self.packed.nbytes

    def dequantized_weight(self) -> Tensor:
        return self.packed.dequantize()

    def extra_repr(self) -> str:
        own = f"bias={self.bias is not None}, bits={self.bits}, group_size={self.group_size}, zeros={self.zeros}"
        return f"{super().extra_repr()}, {own}"


def nearest_blocks(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round to nearest: q ``[Co, Kh, Kw, C]``, scale and zero points for `pack_conv2d_weight`."""
    n, kh, kw, channels = weight.shape
    shape = parameter_shape(group_size, (n, kh, kw, channels))
    if len(shape) == 1:
        q, scale, zero = nearest(weight.reshape(n, -1), bits, -1, symmetric)
    else:
        q, scale, zero = nearest(weight.reshape(-1, channels), bits, group_size, symmetric)
    return q.view(weight.shape), scale.view(shape), None if zero is None else zero.view(shape)
