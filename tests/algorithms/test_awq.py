"""AWQ: the scale's formula, that it never loses on its own inputs, and what it gains."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from epiloq.quantize import Grid, InputStatistics, awq, awq_scale, fold_, gptq, output_error, refine, rtn


def refined(weight: Tensor, hessian: Tensor, grid: Grid) -> object:
    return refine(rtn(weight, grid), weight, hessian)


def scale_of(weight: Tensor, hessian: Tensor, grid: Grid) -> object:
    return awq_scale([weight], hessian, torch.ones(weight.shape[1]), grid)


def salient(channels: int, tokens: int = 800) -> Tensor:
    """Inputs in which a few channels are far larger than the others."""
    x = torch.randn(tokens, channels)
    x[:, ::17] *= 20
    return x


def statistics(x: Tensor) -> InputStatistics:
    seen = InputStatistics(x.shape[1])
    seen.add(x)
    return seen


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_are_of_the_family_and_gain(seed: int, symmetric: bool) -> None:
    x, weights = salient(512), [torch.randn(30, 512), torch.randn(20, 512)]
    seen, grid = statistics(x), Grid(4, 64, symmetric)
    scale = awq_scale(weights, seen.hessian, seen.mean_abs, grid)
    ratios = []
    for ratio in torch.arange(20) / 20:
        candidate = x.abs().mean(0) ** ratio
        ratios.append(candidate / (candidate.max() * candidate.min()) ** 0.5)
    assert any(torch.allclose(scale, candidate, rtol=1e-4) for candidate in ratios)
    assert (scale != 1).any()

    def error(s: Tensor) -> float:
        return sum(float(((x / s) @ rtn(w * s, grid).dequantize().t() - x @ w.t()).square().sum()) for w in weights)

    errors = [error(candidate) for candidate in ratios]
    assert error(scale) <= min(errors) * 1.01
    assert error(scale) < 0.8 * errors[0]


def test_even_inputs_are_left_alone(seed: int) -> None:
    x = torch.randint(2, (500, 32)) * 2.0 - 1  # Not a sign of randn, which gives exact zeros now and then.
    seen = statistics(x)
    scale = awq_scale([torch.randn(8, 32)], seen.hessian, seen.mean_abs, Grid(4, 16))
    torch.testing.assert_close(scale, torch.ones(32))


def test_channels_without_inputs(seed: int) -> None:
    x = salient(64)
    x[:, 5] = 0
    seen = statistics(x)
    scale = awq_scale([torch.randn(8, 64)], seen.hessian, seen.mean_abs, Grid(4, 32))
    assert torch.isfinite(scale).all() and (scale > 0).all()


def test_output_error_is_the_outputs(seed: int) -> None:
    x, difference = salient(40), torch.randn(7, 40)
    expected = (x.double() @ difference.double().t()).square().sum() * 2 / len(x)
    assert output_error(difference, statistics(x).hessian) == pytest.approx(float(expected), rel=1e-4)


def test_folded_and_clipped_layer_is_better(seed: int) -> None:
    """The whole recipe: scale, fold into the norm, clip; against rounding to nearest."""
    norm, linear = nn.LayerNorm(96), nn.Linear(96, 400)
    with torch.no_grad():
        norm.weight[::17] *= 20
    raw = torch.randn(600, 96)
    exact = linear(norm(raw)).detach()
    grid = Grid(3, 32)

    def relative(weight: Tensor) -> float:
        out = nn.functional.linear(norm(raw), weight, linear.bias)
        return float(((out - exact).norm() / exact.norm()).detach())

    plain = relative(rtn(linear.weight.detach(), grid).dequantize())
    seen = statistics(norm(raw).detach())
    scale = awq_scale([linear.weight.detach()], seen.hessian, seen.mean_abs, grid)
    fold_(norm, [linear], scale)
    seen.divide(scale)
    scaled = relative(rtn(linear.weight.detach(), grid).dequantize())
    assert scaled < 0.85 * plain
    assert relative(awq(linear.weight.detach(), seen.hessian, grid).dequantize()) < scaled


def test_errors() -> None:
    with pytest.raises(ValueError, match="ratios"):
        awq_scale([torch.randn(2, 4)], torch.eye(4), torch.ones(4), Grid(), ratios=0)
    with pytest.raises(ValueError, match="mean_abs: expected finite numbers"):
        awq_scale([torch.randn(2, 4)], torch.eye(4), torch.full((4,), float("nan")), Grid())
    with pytest.raises(ValueError, match="output errors that are finite"):
        awq_scale([torch.randn(2, 4) * 1e10], torch.eye(4) * 1e30, torch.ones(4), Grid())


@pytest.mark.parametrize("call", [gptq, awq, refined, scale_of], ids=lambda call: call.__name__)
def test_what_is_no_hessian_is_refused(seed: int, call: Callable[..., object]) -> None:
    weight, eye = torch.randn(3, 8), torch.eye(8)
    for wrong, message in (
        (eye[:, :7], r"hessian: expected \[8, 8\], got \[8, 7\]"),
        (torch.ones(8), r"hessian: expected \[8, 8\], got \[8\]"),
        (eye * float("nan"), "hessian: expected finite numbers"),
        (-eye, "positive semi-definite matrix, got -1 on its diagonal"),
        (eye + torch.randn(8, 8).triu(1), "symmetric positive semi-definite matrix, but mirrored elements differ"),
    ):
        with pytest.raises(ValueError, match=message):
            call(weight, wrong, Grid(4))
    if call is gptq:  # the only one that factors it
        with pytest.raises(ValueError, match="Cholesky factorisation fails"):
            call(weight, 50 - 49 * eye, Grid(4))
    call(weight, torch.zeros(8, 8), Grid(4))


def test_output_error_keeps_nan() -> None:
    assert math.isnan(output_error(torch.full((2, 4), float("nan")), torch.eye(4)))
