"""GPTQ against a float64 transcription of the method, its options, and what it gains."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from epiloq.quantize import Grid, InputStatistics, QuantizedWeight, gptq, rtn
from epiloq.quantize.algorithms.gptq import inverse_factor, uncompensated
from epiloq.weights.codebooks import Float8Grid
from epiloq.weights.rounding import expand_parameters


def inputs(channels: int, tokens: int = 1500) -> Tensor:
    mixed = torch.randn(tokens, channels // 6) @ torch.randn(channels // 6, channels)
    return (mixed + 0.2 * torch.randn(tokens, channels)) * (torch.rand(channels) * 3)


def hessian(x: Tensor) -> Tensor:
    statistics = InputStatistics(x.shape[1], device=x.device)
    for part in x.split(700):
        statistics.add(part)
    return statistics.hessian


def output_error(value: QuantizedWeight, weight: Tensor, x: Tensor) -> float:
    exact = x.double() @ weight.double().t()
    return float((x.double() @ value.dequantize().double().t() - exact).norm() / exact.norm())


def compensated(weight: Tensor, h: Tensor, restored: Tensor, order: Tensor) -> Tensor:
    """What the paper's recursion has left of each weight when its turn comes, given what those before it became.

    One variable after the other is eliminated from the inverse, without blocks or Cholesky, in float64.
    """
    h = h.double()
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(len(h))
    inverse = torch.linalg.inv(damped[order][:, order])
    rest, restored = weight.double()[:, order], restored.double()[:, order]
    for k in range(len(order)):
        tied = inverse[0, 1:] / inverse[0, 0]
        rest[:, k + 1 :] -= (rest[:, k] - restored[:, k]).outer(tied)
        inverse = inverse[1:, 1:] - tied.outer(inverse[0, 1:])
    return rest[:, order.argsort()]


def check(value: QuantizedWeight, weight: Tensor, h: Tensor, act_order: bool) -> None:
    """Each weight is the nearest point of its group to what the recursion left of it.

    A weight beside a tie may fall to either side, and what follows it differs then: so the recursion is given what
    each weight became, rather than its end compared.
    """
    channels = torch.arange(weight.shape[1])
    order = h.diagonal().argsort(descending=True, stable=True) if act_order else channels
    assert value.perm is None or torch.equal(value.perm, order)
    place = channels if value.perm is None else order.argsort()
    q, step = value.q[:, place], expand_parameters(value.parameters, value.grid, weight.shape).scale[:, place]
    restored = value.dequantize()
    off = compensated(weight, h, restored, order) - restored
    clamped = ((q == value.grid.lowest) & (off < 0)) | ((q == value.grid.highest) & (off > 0))
    assert ((off.abs() <= 0.501 * step) | clamped).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [-1, 128, 64, 48])
@pytest.mark.parametrize(("act_order", "static_groups"), [(True, True), (True, False), (False, True), (False, False)])
def test_beats_rounding_to_nearest(
    seed: int, symmetric: bool, group: int, act_order: bool, static_groups: bool
) -> None:
    x, weight = inputs(300), torch.randn(40, 300)
    grid = Grid(4, group, symmetric)
    h = hessian(x)
    for block in (128, 17):
        value = gptq(weight, h, grid, act_order=act_order, static_groups=static_groups, block=block)
        assert output_error(value, weight, x) < 0.5 * output_error(rtn(weight, grid), weight, x)
        assert value.q.min() >= grid.lowest and value.q.max() <= grid.highest
        assert (value.perm is None) == (static_groups or not act_order or group == -1)
        check(value, weight, h, act_order)


def test_without_correlation_is_rounding_to_nearest(seed: int) -> None:
    weight = torch.randn(30, 150)
    for grid in (Grid(4, 64), Grid(4, -1, True), Grid(8, -1, True)):
        for static in (True, False):
            for act_order in (True, False):
                value = gptq(weight, 3 * torch.eye(150), grid, static_groups=static, act_order=act_order)
                assert torch.equal(value.dequantize(), rtn(weight, grid).dequantize())


def test_int8_per_channel(seed: int) -> None:
    x, weight = inputs(200), torch.randn(33, 200)
    grid = Grid(8, -1, symmetric=True)
    value = gptq(weight, hessian(x), grid)
    assert value.q.dtype == torch.int8 and value.scale.shape == (33, 1)
    assert output_error(value, weight, x) < 0.6 * output_error(rtn(weight, grid), weight, x)


@pytest.mark.gpu
def test_on_a_gpu(seed: int) -> None:
    x, weight = inputs(300), torch.randn(40, 300)
    for static_groups in (True, False):
        grid = Grid(4, 64)
        value = gptq(weight.cuda(), hessian(x.cuda()), grid, static_groups=static_groups)
        assert value.q.is_cuda and value.scale.is_cuda
        lost = output_error(value, weight.cuda(), x.cuda())
        assert lost < 0.5 * output_error(rtn(weight, grid), weight, x)


def test_dead_channels_are_rounded_and_compensate_nothing(seed: int) -> None:
    x, weight = inputs(80), torch.randn(9, 80)
    x[:, [0, 17, 79]] = 0
    grid = Grid(4, 16)
    value = gptq(weight, hessian(x), grid)
    nearest = rtn(weight, grid)
    assert torch.equal(value.q[:, [0, 17, 79]], nearest.q[:, [0, 17, 79]])
    assert output_error(value, weight, x) < 0.7 * output_error(nearest, weight, x)
    assert torch.equal(gptq(weight, torch.zeros(80, 80), grid).q, nearest.q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fewer_tokens_than_channels(seed: int, dtype: torch.dtype) -> None:
    """A singular Hessian, without dampening: it grows until the factorisation succeeds."""
    x, weight = torch.randn(10, 90), torch.randn(7, 90)
    value = gptq(weight, hessian(x), Grid(4, 32), dampening=0, dtype=dtype)
    assert output_error(value, weight, x) < output_error(rtn(weight, Grid(4, 32)), weight, x)


def test_factor_is_the_inverses(seed: int) -> None:
    h = hessian(inputs(40)).double()
    upper = inverse_factor(h, 0.01)
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(40, dtype=torch.float64)
    torch.testing.assert_close(upper.t() @ upper @ damped, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-8)
    assert torch.equal(upper, upper.triu())


def test_stacked_layers_are_quantised_as_each_alone(seed: int) -> None:
    x = inputs(64)
    first, second, h = torch.randn(10, 64), torch.randn(6, 64), hessian(x)
    grid = Grid(4, 32)
    for part, weight in zip(gptq(torch.cat((first, second)), h, grid).split((10, 6)), (first, second), strict=True):
        assert torch.equal(part.scale, gptq(weight, h, grid).scale)
        check(part, weight, h, act_order=True)


def test_costs_of_columns_add_up_to_the_output_error(seed: int) -> None:
    """What the recursion could not compensate, by each column's cost, is the whole output error."""
    x, weight = inputs(90), torch.randn(11, 90)
    x[:, 5] = 0
    h = hessian(x).double()
    value, costs = gptq(weight, h, Grid(4, 32)), uncompensated(h)
    order = h.diagonal().argsort(descending=True, stable=True)
    decoupled = h.clone()
    decoupled[5, 5] = h.diagonal()[h.diagonal() != 0].mean()
    left = (compensated(weight, decoupled, value.dequantize(), order) - value.dequantize()).square() @ costs.double()
    damped = decoupled + 0.01 * decoupled.diagonal().mean() * torch.eye(90)
    difference = value.dequantize().double() - weight.double()
    difference[:, 5] = 0
    torch.testing.assert_close(left, ((difference @ damped) * difference).sum(1), rtol=1e-4, atol=0)
    assert costs[5] == 0


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("grid", [Grid(4, 64), Grid(4, -1, True), Grid(2, 32), Float8Grid(8, 32)])
def test_clipping_is_the_best_for_each_row(seed: int, grid: Grid | Float8Grid, static: bool) -> None:
    x, weight = inputs(96), torch.randn(160, 96) * torch.randn(160, 96).exp()
    h = hessian(x).double()
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(96)

    def rounded(moments: Tensor | Literal["best"] | None) -> tuple[Tensor, Tensor]:
        value = gptq(weight, h, grid, moments=moments, act_order=static, static_groups=static)
        difference = value.dequantize().double() - weight.double()
        return value.dequantize(), ((difference @ damped) * difference).sum(1)

    options = [rounded(None), rounded(h.diagonal()), rounded(uncompensated(h) if static else _in_order(h))]
    best, lost = rounded("best")
    together = [o[1].view(-1, grid.rows).sum(1).repeat_interleave(grid.rows) for o in options]
    torch.testing.assert_close(
        lost.view(-1, grid.rows).sum(1).repeat_interleave(grid.rows), torch.stack(together).amin(0), rtol=1e-3, atol=0
    )
    same = [(best == o[0]).all(1) for o in options]
    assert torch.stack(same).any(0).all() and not same[0].all()


def _in_order(h: Tensor) -> Tensor:
    return inverse_factor(h, 0.01).diagonal().float().square().reciprocal()


def test_statistics(seed: int) -> None:
    x = torch.randn(3, 50, 12) * 4
    statistics = InputStatistics(12, dtype=torch.float64)
    statistics.add(x[0])
    statistics.add(x[1:])
    statistics.add(x[:0])
    flat = x.reshape(-1, 12).double()
    torch.testing.assert_close(statistics.hessian, 2 / 150 * flat.t() @ flat)
    torch.testing.assert_close(statistics.mean_abs.double(), flat.abs().mean(0), rtol=1e-6, atol=0)
    assert torch.equal(statistics.amax.double(), flat.abs().amax(0))
    scale = torch.rand(12) + 0.5
    statistics.divide(scale)
    torch.testing.assert_close(statistics.hessian, 2 / 150 * (flat / scale).t() @ (flat / scale))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_statistics_of_inputs_that_are_not_finite_are_refused(seed: int, wrong: float) -> None:
    statistics = InputStatistics(4)
    statistics.add(torch.randn(5, 4).index_fill(1, torch.tensor([2]), wrong))
    for read in ("hessian", "mean_abs", "amax", "shrunk"):
        with pytest.raises(ValueError, match="inputs: expected finite numbers"):
            getattr(statistics, read)
    with pytest.raises(ValueError, match="inputs: expected finite numbers"):
        statistics.check_finite()


def test_errors() -> None:
    weight = torch.randn(3, 8)
    with pytest.raises(ValueError, match="hessian"):
        gptq(weight, torch.eye(7), Grid())
    with pytest.raises(ValueError, match="finite"):
        gptq(weight, torch.full((8, 8), float("nan")), Grid())
    with pytest.raises(ValueError, match="dampening"):
        gptq(weight, torch.eye(8), Grid(), dampening=-1)
    with pytest.raises(ValueError, match="Cholesky"):
        gptq(weight, 50 * torch.ones(8, 8) - 49 * torch.eye(8), Grid())
