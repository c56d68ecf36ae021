"""Convolutions in float64 by their definition, one tap at a time, and random problems for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq.weights.packed_conv2d_weight import PackedConv2dWeight
from reference import ulp


@dataclass
class Place:
    """How a kernel moves: padding is top, bottom, left, right."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        return vars(self).copy()

    def fits(self, image: tuple[int, int], kernel: tuple[int, int]) -> bool:
        top, bottom, left, right = self.padding
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, kernel, strict=True)]
        return reach[0] <= image[0] + top + bottom and reach[1] <= image[1] + left + right


def sums(x: Tensor, weight: Tensor, place: Place) -> Tensor:
    """x ``[B, H, W, Ci]`` and weight ``[Co, Kh, Kw, Ci / groups]`` to ``[B, P, Q, Co]``, all in float64."""
    x, weight = x.double().cpu(), weight.double().cpu()
    batch, height, width, channels = x.shape
    n, kh, kw, per_group = weight.shape
    top, bottom, left, right = place.padding
    padded = x.new_zeros(batch, height + top + bottom, width + left + right, channels)
    padded[:, top : top + height, left : left + width] = x
    p = (padded.shape[1] - place.dilation[0] * (kh - 1) - 1) // place.stride[0] + 1
    q = (padded.shape[2] - place.dilation[1] * (kw - 1) - 1) // place.stride[1] + 1
    out = x.new_zeros(batch, p, q, n)
    of_groups = weight.view(place.groups, n // place.groups, kh, kw, per_group)
    for i in range(kh):
        for j in range(kw):
            rows = torch.arange(p) * place.stride[0] + i * place.dilation[0]
            columns = torch.arange(q) * place.stride[1] + j * place.dilation[1]
            seen = padded[:, rows][:, :, columns].view(batch, p, q, place.groups, per_group)
            out += torch.einsum("bpqgc,gnc->bpqgn", seen, of_groups[:, :, i, j]).reshape(out.shape)
    return out


@dataclass
class Int8Problem:
    """Operands of `conv2d_int8`."""

    x: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    place: Place = field(default_factory=Place)
    input_scale: float = 0.02
    input_zero: int = -5
    output_scale: float = 0.3
    output_zero: int = 3

    @property
    def scales(self) -> dict[str, Any]:
        return {"input_scale": self.input_scale, "input_zero": self.input_zero, "weight_scale": self.weight_scale}

    @property
    def output(self) -> dict[str, Any]:
        return {"output_scale": self.output_scale, "output_zero": self.output_zero}

    def real(self, unit: float = 1.0) -> tuple[Tensor, Tensor]:
        """The real output in units of ``unit``, with multipliers and biases rounded once to float32; and its terms."""
        acc = sums(self.x.double() - self.input_zero, self.weight, self.place)
        scale = (self.weight_scale.double().cpu() * (self.input_scale / unit)).float().double()
        bias = torch.zeros(1) if self.bias is None else (self.bias.double().cpu() / unit).float()
        return acc * scale + bias.double(), (acc * scale).abs() + bias.double().abs()

    def requantized(self, clamp: tuple[float, float] | None = None) -> Tensor:
        r, _ = self.real(self.output_scale)
        if clamp is not None:
            r = r.clamp(clamp[0] / self.output_scale, clamp[1] / self.output_scale)
        return (torch.round(r) + self.output_zero).clamp(-128, 127)


def int8_problem(
    image: tuple[int, int, int, int],
    n: int,
    kernel: tuple[int, int],
    place: Place | None = None,
    *,
    bias: bool = True,
    per_channel: bool = True,
    device: str = "cpu",
    **numbers: Any,
) -> Int8Problem:
    place = place or Place()
    x = torch.randint(-128, 128, image, dtype=torch.int8)
    weight = torch.randint(-128, 128, (n, *kernel, image[3] // place.groups), dtype=torch.int8)
    weight_scale = torch.rand(n if per_channel else 1) * 0.01 + 1e-3
    # Outputs that fill int8 and saturate now and then.
    numbers.setdefault("output_scale", 0.02 * 0.006 * 5400 * (weight[0].numel() if n else 1) ** 0.5 / 60)
    offset = torch.randn(n) * 40 * numbers["output_scale"] if bias else None
    parts = (x, weight, weight_scale, offset)
    return Int8Problem(*(None if t is None else t.to(device) for t in parts), place, **numbers)  # type: ignore[arg-type]


def assert_float_close(out: Tensor, reference: Tensor, terms: Tensor) -> None:
    """Within one unit in the last place, and fp32's roundings of the terms."""
    error = (out.double().cpu() - reference).abs()
    limit = ulp(reference, out.dtype) + 2.0**-22 * terms
    assert not error.isnan().any(), "NaN: an element that was never written?"
    assert (error <= limit).all(), f"worst element {float((error / limit).max()):.2f} times the bound"


@dataclass
class Packed:
    """A random low-bit weight and its value in float64, ``[Co, Kh, Kw, C]``."""

    packed: PackedConv2dWeight
    exact: Tensor


def packed(
    n: int,
    kernel: tuple[int, int],
    channels: int,
    bits: int,
    group_size: int,
    zeros: str = "none",
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Packed:
    low, high = (-(1 << bits - 1), 1 << bits - 1) if zeros == "none" else (0, 1 << bits)
    q = torch.randint(low, high, (n, *kernel, channels))
    per_channel = group_size == -1 or channels == 1
    length = channels if per_channel else group_size
    shape = (n, 1, 1, 1) if per_channel else (n, *kernel, -(-channels // length))
    scale = (torch.rand(shape) * 0.02 + 1e-3).to(dtype)
    zero = torch.randint(0, high, shape) if zeros == "zero" else None
    offset = torch.randn(shape).mul(0.05).to(dtype) if zeros == "offset" else None

    def spread(values: Tensor) -> Tensor:
        return values.double().repeat_interleave(length, 3)[..., :channels]

    exact = q.double() - (0 if zero is None else spread(zero))
    exact = exact * spread(scale) + (0 if offset is None else spread(offset))
    given = [None if t is None else (t.flatten() if per_channel else t).to(device) for t in (scale, zero, offset)]
    assert given[0] is not None
    whole = epiloq.pack_conv2d_weight(q.to(device), given[0], given[1], given[2], bits=bits, group_size=group_size)
    return Packed(whole, exact)
