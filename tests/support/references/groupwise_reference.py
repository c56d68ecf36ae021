"""float8 products with scales by groups in float64, and the bound that they keep."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import epiloq
from reference import ulp

RECIPES = ((1, 128, 128), (128, 128, 128), (1, 1, 128))
Recipe = tuple[int, int, int]


def up(size: int, multiple: int) -> int:
    return -(-size // multiple)


@dataclass
class Problem:
    a: Tensor
    weight: Tensor  # [N, K], or [E, N, K]
    scale_a: Tensor
    scale_b: Tensor
    recipe: Recipe

    @property
    def b(self) -> Tensor:
        return self.weight.transpose(-1, -2)

    def in_columns(self, multiple: int) -> Problem:
        """The same with scales of tokens in columns that begin at multiples of so many; of 4, TMA copies them."""
        rows, blocks = self.scale_a.shape
        columns = self.scale_a.new_full((blocks, up(rows, multiple) * multiple), float("nan"))
        columns[:, :rows] = self.scale_a.t()
        return replace(self, scale_a=columns[:, :rows].t())

    def spread_weight(self) -> Tensor:
        """The dequantised weight's scales, element by element, in float64: […, K, N]."""
        scale = self.scale_b.double().repeat_interleave(128, dim=-2).repeat_interleave(self.recipe[1], dim=-1)
        return scale[..., : self.b.shape[-2], : self.b.shape[-1]]

    def operands(self) -> tuple[Tensor, Tensor]:
        """Dequantised, in float64."""
        scale = self.scale_a.double().repeat_interleave(128, dim=-1).repeat_interleave(self.recipe[0], dim=-2)
        scale = scale[..., : self.a.shape[-2], : self.a.shape[-1]]
        return self.a.double() * scale, self.b.double() * self.spread_weight()


def values(*shape: int, device: str) -> Tensor:
    return (torch.randn(*shape, device=device) * 64).to(torch.float8_e4m3fn)


def scales(*shape: int, device: str) -> Tensor:
    return torch.rand(*shape, device=device) * 0.02 + 1e-3


def make(m: int, n: int, k: int, *, device: str = "cpu", recipe: Recipe = RECIPES[0], experts: int = 0) -> Problem:
    lead = (experts,) if experts else ()
    return Problem(
        values(m, k, device=device),
        values(*lead, n, k, device=device),
        scales(up(m, recipe[0]), up(k, 128), device=device),
        scales(*lead, up(k, 128), up(n, recipe[1]), device=device),
        recipe,
    )


def assert_close(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
    """Within one ulp of the output and 2^-8 of the root of the sum of squared terms, as docs/numerics.md says."""
    reference = left @ right + (0 if bias is None else bias.double())
    span = (left.square() @ right.square()).sqrt()
    error = (out.double().reshape(reference.shape) - reference).abs()
    assert not error.isnan().any(), "NaN: an element that was never written?"
    limit = ulp(reference, out.dtype) + 2.0**-8 * span
    worst = float((error / limit.clamp(min=1e-300)).max()) if error.numel() else 0.0
    assert (error <= limit).all(), f"worst element {worst:.2f} times the bound"
    if reference.count_nonzero() > 100:  # DeepGEMM's measure
        difference = 1 - 2 * float((out.double().reshape(reference.shape) * reference).sum()) / float(
            out.double().square().sum() + reference.square().sum()
        )
        assert difference < 1e-3


def call(p: Problem, bias: Tensor | None = None, **kwargs: object) -> Tensor:
    """`epiloq.groupwise_mm` of a problem."""
    return epiloq.groupwise_mm(p.a, p.b, p.scale_a, p.scale_b, bias, recipe=p.recipe, **kwargs)  # type: ignore[arg-type]
