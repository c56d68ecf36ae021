"""Refinement after rounding: the objective falls and never rises, for every grid, and what stays is optimal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epiloq.quantize import CodedWeight, Float8Grid, Grid, OffsetGrid, QuantizedWeight, gptq, refine, rtn
from epiloq.quantize.algorithms.refine import DAMPENING, joined


def layer(rows: int = 24, channels: int = 88) -> tuple[Tensor, Tensor]:
    x = torch.randn(400, channels // 4) @ torch.randn(channels // 4, channels) + 0.3 * torch.randn(400, channels)
    x *= torch.rand(channels) * 3
    return torch.randn(rows, channels), x.t() @ x / 200


def objective(value: QuantizedWeight | CodedWeight, weight: Tensor, hessian: Tensor) -> Tensor:
    """Of each row, in float64, of the dampened Hessian."""
    h = hessian.double()
    h = h + DAMPENING * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    difference = value.dequantize().double() - weight.double()
    return ((difference @ h) * difference).sum(1)


GRIDS: tuple[Any, ...] = (
    *(Grid(bits, group, symmetric) for bits in (2, 3, 4, 8) for group, symmetric in ((32, False), (-1, True))),
    Grid(4, 20, scale_dtype=torch.float16),
    Grid(4, -1, False, torch.bfloat16),
    Float8Grid(),
    Float8Grid(16, 32),
    OffsetGrid(4, 32),
)


@pytest.mark.parametrize("start", ["rtn", "gptq"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_no_row_gets_worse(seed: int, grid: Any, start: str) -> None:
    weight, hessian = layer()
    value = rtn(weight, grid) if start == "rtn" else gptq(weight, hessian, grid)
    before = objective(value, weight, hessian)
    for rounds in (1, 1, 3):
        found = refine(value, weight, hessian, rounds=rounds)
        after = objective(found, weight, hessian)
        assert (after <= before * (1 + 1e-5)).all()
        assert found.q.dtype == grid.dtype
        value, before = found, after
    if isinstance(grid, Grid):
        assert torch.equal(value.scale.to(grid.scale_dtype).float(), value.scale)
        assert value.q.min() >= grid.lowest and value.q.max() <= grid.highest
        assert grid.symmetric or (value.zero.min() >= 0 and value.zero.max() <= grid.highest)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("order", [{}, {"static_groups": False}])
def test_gains_over_gptq(seed: int, bits: int, order: dict[str, bool]) -> None:
    """In almost every row: by how much differs from one Hessian to another."""
    weight, hessian = layer(40, 96)
    value = gptq(weight, hessian, Grid(bits, 32), moments=hessian.diagonal(), **order)
    found = refine(value, weight, hessian)
    assert (found.perm is None) == (value.perm is None)
    better = objective(found, weight, hessian) < 0.999 * objective(value, weight, hessian)
    assert better.sum() > 32  # 38 to 40 of 40


def test_no_code_and_no_scale_could_be_better(seed: int) -> None:
    """At the end each code is the best for its row while the rest stays, and each scale has no slope."""
    weight, hessian = layer(6, 24)
    grid = Grid(3, 8)
    found = refine(gptq(weight, hessian, grid), weight, hessian, rounds=200)
    least = objective(found, weight, hessian)
    for column in range(24):
        for code in range(8):
            q = found.q.clone()
            q[:, column] = code
            other = QuantizedWeight(q, found.scale, found.zero, grid)
            assert (objective(other, weight, hessian) >= least * (1 - 1e-4)).all()
    for group in range(3):
        for factor in (0.99, 1.01):
            scale = found.scale.clone()
            scale[:, group] *= factor
            other = QuantizedWeight(found.q, scale, found.zero, grid)
            assert (objective(other, weight, hessian) >= least * (1 - 1e-4)).all()
        for step in (-1, 1):
            zero = found.zero.clone()
            zero[:, group] = (zero[:, group] + step).clamp(0, 7)
            other = QuantizedWeight(found.q, found.scale, zero, grid)
            assert (objective(other, weight, hessian) >= least * (1 - 1e-4)).all()


def test_an_exact_weight_stays(seed: int) -> None:
    _, hessian = layer()
    value = rtn(torch.randn(24, 88), Grid(4, 32))
    found = refine(value, value.dequantize(), hessian)
    assert torch.equal(found.dequantize(), value.dequantize())


def test_zero_weights_dead_channels_and_no_rounds(seed: int) -> None:
    weight, hessian = layer()
    hessian[3] = hessian[:, 3] = 0
    weight[:, 3] = 100
    value = rtn(weight, Grid(4, 32))
    assert torch.equal(refine(value, weight, hessian, rounds=0).dequantize(), value.dequantize())
    found = refine(value, weight, hessian, dampening=0)
    assert torch.isfinite(found.dequantize()).all()
    assert torch.equal(refine(value, weight, torch.zeros_like(hessian), dampening=0).q, value.q)
    nothing = torch.zeros_like(weight)
    assert torch.equal(refine(rtn(nothing, Grid(4, 32)), nothing, hessian).dequantize(), nothing)


def test_refused(seed: int) -> None:
    weight, hessian = layer()
    value = rtn(weight, Grid(4, 32))
    for change, message in (
        ({"weight": weight[:5]}, "weight: expected"),
        ({"weight": weight * float("nan")}, "weight: expected finite"),
        ({"hessian": hessian[:5]}, "hessian: expected"),
        ({"rounds": -1}, "rounds: expected"),
        ({"dampening": -1.0}, "dampening: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            refine(value, **{"weight": weight, "hessian": hessian} | change)


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 32, True), OffsetGrid(4, 32)], ids=str)
def test_joined_undoes_split(seed: int, grid: Any) -> None:
    value = rtn(torch.randn(10, 64), grid)
    found = joined(value.split([3, 0, 7]))
    assert torch.equal(found.q, value.q) and torch.equal(found.dequantize(), value.dequantize())
