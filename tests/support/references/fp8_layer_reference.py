"""FP8 layers from their documented formulas, the sums in float64, without epiloq's operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.nn import Fp8BlockLinear, Fp8Linear
from reference import ulp

LARGEST, SMALLEST = 448.0, 2.0**-126


@dataclass(frozen=True)
class Kind:
    """A layer's class and options, and what shares a scale: rows and columns of the weight, and of the input."""

    module: type[Fp8Linear] | type[Fp8BlockLinear]
    options: dict[str, Any]
    weight_part: tuple[int | None, int | None]
    input_part: tuple[int | None, int | None]

    @property
    def is_static(self) -> bool:
        return self.options.get("activation") == "static"

    def from_linear(self, linear: nn.Linear, x: Tensor) -> nn.Module:
        scale = {"input_scale": static_scale(x)} if self.is_static else {}
        return self.module.from_linear(linear, **self.options, **scale)

    def fresh(self, *sizes: int, **arguments: Any) -> nn.Module:
        return self.module(*sizes, **self.options, **arguments)


def _rows(activation: str, weight: str) -> Kind:
    parts: dict[str, tuple[int | None, int | None]] = {"token": (1, None), "channel": (1, None)}
    options = {"activation": activation, "weight": weight}
    return Kind(Fp8Linear, options, parts.get(weight, (None, None)), parts.get(activation, (None, None)))


KINDS = {
    "token-channel": _rows("token", "channel"),
    "token-tensor": _rows("token", "tensor"),
    "tensor-channel": _rows("tensor", "channel"),
    "tensor-tensor": _rows("tensor", "tensor"),
    "static-channel": _rows("static", "channel"),
    "static-tensor": _rows("static", "tensor"),
    "block": Kind(Fp8BlockLinear, {}, (128, 128), (1, 128)),
}


def static_scale(x: Tensor) -> float:
    """Too small for the largest values of `x`, so that they saturate."""
    return float(x.abs().amax()) / LARGEST / 2


def scales(x: Tensor, part: tuple[int | None, int | None]) -> Tensor:
    """A float32 scale for each element of a matrix, those of a part equal."""
    high, wide = (size or max(length, 1) for size, length in zip(part, x.shape, strict=True))
    result = torch.empty(x.shape)
    for i in range(0, x.shape[0], high):
        for j in range(0, x.shape[1], wide):
            amax = x[i : i + high, j : j + wide].float().abs().amax()
            result[i : i + high, j : j + wide] = (amax / LARGEST).clamp_min(SMALLEST)
    return result


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """What x becomes, in float64."""
    q = (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return q.double() * scale.double()


def exact(kind: Kind, linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's output, and the root of the sum of its squared terms: the span of a random walk of them."""
    weight = linear.weight.detach()
    w = rounded(weight, scales(weight, kind.weight_part))
    input_scale = torch.tensor(static_scale(x)) if kind.is_static else scales(x, kind.input_part)
    a = rounded(x, input_scale)
    bias = 0 if linear.bias is None else linear.bias.detach().double()
    return a @ w.t() + bias, (a.square() @ w.t().square()).sqrt()


def assert_matches_float64(y: Tensor, kind: Kind, linear: nn.Linear, x: Tensor, span_bound: float = 2.0**-18) -> None:
    """Within an ulp of `y`'s dtype and `span_bound` times the span of the terms; fp32 sums are far within 2^-18."""
    reference, span = exact(kind, linear, x)
    limit = ulp(reference, y.dtype) + span_bound * span
    worst = ((y.double() - reference).abs() / limit.clamp_min(1e-300)).max()
    assert worst <= 1, f"worst element {float(worst):.2f} times the bound"
