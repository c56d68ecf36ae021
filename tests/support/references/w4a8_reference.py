"""8-bit activations by 4-bit weights, in float64, and the bound of docs/numerics.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import epiloq
from reference import poisoned, ulp
from weight_reference import Weight, make_weight

KINDS = ("symmetric", "zero")
ACTIVATIONS = (torch.float8_e4m3fn, torch.int8)


@dataclass
class Problem:
    """Arguments of `epiloq.w4a8_mm`."""

    x_q: Tensor
    weight: Weight
    scale_a: Tensor
    bias: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, epiloq.PackedWeight, Tensor, Tensor | None]:
        return self.x_q, self.weight.packed, self.scale_a, self.bias

    def exact(self) -> tuple[Tensor, Tensor]:
        """The result ``[M, N]`` and the magnitude of its terms."""
        rows = self.x_q.double().reshape(-1, self.x_q.shape[-1])
        scale = self.scale_a.double().reshape(-1, 1)
        result = scale * (rows @ self.weight.dense.t())
        size = scale.abs() * (rows.abs() @ self.weight.size.t())
        if self.bias is not None:
            result, size = result + self.bias.double(), size + self.bias.double().abs()
        return result, size


def make_activations(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (m, k), device=device).to(dtype)
    return (torch.randn(m, k, device=device) * 60).clamp(-448, 448).to(dtype)


def make_problem(
    m: int,
    n: int,
    k: int,
    group_size: int = 128,
    kind: str = "symmetric",
    activations: torch.dtype = torch.float8_e4m3fn,
    *,
    bias: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float16,
    act_order: bool = False,
    device: str = "cpu",
) -> Problem:
    weight = make_weight(n, k, 4, group_size, kind, scale_dtype=scale_dtype, act_order=act_order, device=device)
    scale_a = torch.rand(m, 1, device=device) * 0.02 + 1e-3
    added = None if bias is None else torch.randn(n, device=device).to(bias)
    return Problem(make_activations(m, k, activations, device), weight, scale_a, added)


def assert_close(y: Tensor, problem: Problem) -> None:
    exact, size = problem.exact()
    bound = ulp(exact, y.dtype) + 2.0**-23 * problem.x_q.shape[-1] ** 0.5 * size
    if y.is_cuda:
        bound += 2.0**-7 * size  # where activations become bfloat16; the float8 kernel is within 2^-12
    error = (y.double().reshape(exact.shape) - exact).abs()
    assert not error.isnan().any(), "NaN: an element that was never written?"
    assert (error <= bound).all(), f"worst element {float((error / bound).max()):.2f} times the bound"


def run_and_assert_close(problem: Problem, dtype: torch.dtype) -> None:
    """With and without an output that is given."""
    out = poisoned((*problem.x_q.shape[:-1], problem.weight.packed.n), dtype, str(problem.x_q.device))
    assert epiloq.w4a8_mm(*problem.arguments, out=out) is out
    assert_close(out, problem)
    assert torch.equal(epiloq.w4a8_mm(*problem.arguments, out_dtype=dtype), out)
