"""Float64 definitions of block-quantised products, written from the documented formulas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import epiloq
from reference import ulp


@dataclass
class RawWeight:
    """q [N, K] as integers, and its parameters as they are given, [N, G] or broadcast to it."""

    q: Tensor
    scale: Tensor
    offset: Tensor | None
    group: int
    bits: int

    @property
    def packed(self) -> Tensor:
        """What the call takes: int8, or two 4-bit values a byte with the even one in the low half."""
        if self.bits == 8:
            return self.q
        pairs = torch.nn.functional.pad(self.q.to(torch.int32), (0, self.q.shape[1] % 2)) % 16
        both = pairs[:, ::2] + 16 * pairs[:, 1::2]
        return torch.where(both > 127, both - 256, both).to(torch.int8)

    def prepared(self) -> epiloq.BlockQuantWeight:
        return epiloq.online_quant_weight(
            self.packed, self.scale, self.offset, group_size=self.group, bits=self.bits, in_features=self.q.shape[1]
        )


def make_weight(
    n: int, k: int, group: int, *, bits: int = 8, offset: bool = True, per: str = "both", device: str = "cpu"
) -> RawWeight:
    """per: "both" (a parameter a row and block), "row" or "block"."""
    blocks = -(-k // group)
    shape = {"both": (n, blocks), "row": (n, 1), "block": (1, blocks)}[per]
    q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), dtype=torch.int8)
    scale = (torch.rand(shape) + 0.1) / 2 ** (bits - 1)
    return RawWeight(
        q.to(device), scale.to(device), torch.randn(shape).mul_(0.3).to(device) if offset else None, group, bits
    )


def by_block(x: Tensor, group: int) -> list[Tensor]:
    return list(x.split(group, -1))


def quantised(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (float64), scale and offset of x's blocks; float32 where the definition says so, and computed on the CPU, for
    CUDA's torch multiplies by 1 / 255 where it should divide."""
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for block in by_block(x.float().cpu(), group):
        lo, hi = block.amin(-1, keepdim=True), block.amax(-1, keepdim=True)
        step = ((hi - lo) / 255).clamp_min(2.0**-126)
        scale = torch.where(hi == lo, torch.ones_like(step), step)
        offset = torch.where(hi == lo, hi, hi - 127 * scale)
        for part, value in zip(
            parts, (((block - offset) / scale).round().clamp(-128, 127), scale, offset), strict=True
        ):
            part.append(value.double().to(x.device))
    return torch.cat(parts[0], -1), torch.cat(parts[1], -1), torch.cat(parts[2], -1)


def exact(x: Tensor, weight: RawWeight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product in float64 where the operands are, and its terms' magnitude, which float32's rounding scales with."""
    k = weight.q.shape[1]
    blocks = -(-k // weight.group)
    q_x, scale_x, offset_x = quantised(x.reshape(-1, k), weight.group)
    scale = weight.scale.double().expand(weight.q.shape[0], blocks)
    offset = torch.zeros_like(scale) if weight.offset is None else weight.offset.double().expand_as(scale)
    result = torch.zeros(q_x.shape[0], weight.q.shape[0], dtype=torch.float64, device=q_x.device)
    magnitude = torch.zeros_like(result)
    blocks_of_both = zip(by_block(q_x, weight.group), by_block(weight.q.double(), weight.group), strict=True)
    for i, (a, b) in enumerate(blocks_of_both):
        s_a, o_a, s_b, o_b = scale_x[:, i : i + 1], offset_x[:, i : i + 1], scale[:, i], offset[:, i]
        total = b.sum(1) * s_b + b.shape[1] * o_b
        for term in (s_a * s_b * (a @ b.t()), s_a * a.sum(1, keepdim=True) * o_b, o_a * total):
            result += term
            magnitude += term.abs()
    if bias is not None:
        result += bias.double()
        magnitude += bias.double().abs()
    return result, magnitude


def assert_close(
    out: Tensor,
    x: Tensor,
    weight: RawWeight,
    bias: Tensor | None = None,
    clamp: tuple[float, float] = (-float("inf"), float("inf")),
) -> None:
    """Within one unit in the last place, and float32 roundings that grow with the square root of the blocks."""
    result, magnitude = exact(x, weight, bias)
    blocks = -(-weight.q.shape[1] // weight.group)
    limit = ulp(result, out.dtype) + 2.0**-22 * (2 + blocks**0.5) * magnitude
    got = out.double().reshape(result.shape)
    assert not got.isnan().any(), "NaN: an element that was never written?"
    error = (got - result.clamp(*clamp)).abs()
    assert (error <= limit).all(), f"worst element {float((error / limit).max()):.2f} times the bound"
