"""Every algorithm of the table lowers its own objective, or leaves it, on layers of random shapes, grids and inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers", reason="the models are transformers'")

from epiloq.quantize import Grid, autoround, awq_scale, gptq, output_error, rtn
from epiloq.quantize.algorithms.gptq import DAMPENING, without_dead
from epiloq.quantize.algorithms.one_weight import clip_moments, round_weight
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.weights.codebooks import Calibrated
from epiloq.weights.rounding import expand_parameters
from model_families import VOCABULARY, llama

ROUNDING = 1e-4
"""Relative difference that float32 sums of some hundred products may have."""


@dataclass(frozen=True)
class Layer:
    """A weight ``[N, K]``, the inputs ``[tokens, K]`` that calibration sees, and a grid."""

    weight: Tensor
    x: Tensor
    grid: Grid

    @property
    def hessian(self) -> Tensor:
        return self.x.t() @ self.x

    def lost(self, value: Calibrated) -> Tensor:
        return (value.dequantize() - self.weight).double()

    def output_errors(self, value: Calibrated) -> Tensor:
        """Each row's squared output error, with a dampened Hessian."""
        return self._errors(value, self.hessian.double())

    def compensated_errors(self, value: Calibrated) -> Tensor:
        """The same with the Hessian that GPTQ factors, in which channels without inputs count."""
        return self._errors(value, without_dead(self.hessian.double()))

    def _errors(self, value: Calibrated, matrix: Tensor) -> Tensor:
        matrix.diagonal().add_(DAMPENING * matrix.diagonal().mean())
        return ((self.lost(value) @ matrix) * self.lost(value)).sum(1)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """From one row and two channels on; inputs of any rank, some channels without any, some far larger."""
    rows, channels, rank = draw(st.integers(1, 9)), draw(st.integers(2, 70)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(120, rank) @ normal(rank, channels) + draw(st.sampled_from([0.0, 0.1, 1.0])) * normal(120, channels)
    x[:, :: draw(st.integers(2, 9))] *= draw(st.sampled_from([0.0, 1.0, 20.0]))
    grid = Grid(
        draw(st.integers(2, 8)),
        draw(st.sampled_from([-1, 1, 16, 48])),
        draw(st.booleans()),
        draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
    )
    return Layer(normal(rows, channels) ** draw(st.sampled_from([1, 3])), x, grid)


def squared(layer: Layer, value: Calibrated) -> Tensor:
    return layer.lost(value).square().sum(1)


def within_groups(layer: Layer, value: Calibrated) -> Tensor:
    """Each row's squared output error, as if inputs of different groups were uncorrelated."""
    group = torch.arange(layer.weight.shape[1]) // layer.grid.length(layer.weight.shape[1])
    matrix = layer.hessian.double() * (group[:, None] == group)
    return ((layer.lost(value) @ matrix) * layer.lost(value)).sum(1)


def nearest(layer: Layer) -> Calibrated:
    return rtn(layer.weight, layer.grid)


def compensated(layer: Layer) -> Calibrated:
    return round_weight(layer.weight, layer.grid, ALGORITHMS["gptq"], layer.hessian)


OF_A_WEIGHT: dict[str, tuple[Callable[[Layer, Calibrated], Tensor], Callable[[Layer], Calibrated]]] = {
    "rtn-mse": (squared, nearest),
    "awq": (within_groups, nearest),
    "gptq+ranges": (Layer.compensated_errors, compensated),
    "gptq+refine": (Layer.output_errors, compensated),
    "gptq-guided": (Layer.output_errors, compensated),
    "awq+gptq-guided": (Layer.output_errors, compensated),
}
"""What an algorithm minimises for each row of a weight, and what it is never worse than."""


@pytest.mark.parametrize("name", OF_A_WEIGHT)
@settings(max_examples=30)
@given(layer=layers())
def test_no_row_is_worse_than_the_start(name: str, layer: Layer) -> None:
    objective, start = OF_A_WEIGHT[name]
    found = objective(layer, round_weight(layer.weight, layer.grid, ALGORITHMS[name], layer.hessian))
    known = objective(layer, start(layer))
    assert (found <= known * (1 + ROUNDING) + ROUNDING**2 * objective(layer, _zero(layer))).all()


def _zero(layer: Layer) -> Calibrated:
    """A weight whose error is the whole weight."""
    value = rtn(torch.zeros_like(layer.weight), layer.grid)
    assert not value.dequantize().any()
    return value


@settings(max_examples=30)
@given(layer=layers())
def test_gptq_rounds_each_column_to_nearest_after_compensation(layer: Layer) -> None:
    """Its last column's rounding error is the least that its range allows, given all other columns."""
    moments = clip_moments(layer.weight, ALGORITHMS["gptq"], layer.hessian)
    value = gptq(layer.weight, layer.hessian, layer.grid, moments=moments)
    matrix = without_dead(layer.hessian.double())
    last = int(matrix.diagonal().argsort(descending=True, stable=True)[-1])
    matrix.diagonal().add_(DAMPENING * matrix.diagonal().mean())
    steps = expand_parameters(value.parameters, value.grid, layer.weight.shape).scale[:, last].double()
    # Half the objective's derivative by the column, divided by its curvature: the distance to the best real value.
    distance = (layer.lost(value) @ matrix[:, last]) / matrix[last, last]
    clamped = (value.q[:, last] == value.grid.lowest) & (distance > 0)
    clamped |= (value.q[:, last] == value.grid.highest) & (distance < 0)
    assert ((distance.abs() <= (0.5 + 1e-2) * steps) | clamped).all()


@settings(max_examples=30)
@given(layer=layers())
def test_awq_scales_are_never_worse_than_none(layer: Layer) -> None:
    scale = awq_scale([layer.weight], layer.hessian, layer.x.abs().mean(0), layer.grid)

    def error(s: Tensor) -> float:
        return output_error(rtn(layer.weight * s, layer.grid).dequantize() / s - layer.weight, layer.hessian)

    ones = torch.ones_like(scale)
    assert error(scale) <= error(ones) * (1 + ROUNDING) + ROUNDING**2 * output_error(layer.weight, layer.hessian)


@settings(max_examples=15)
@given(layer=layers())
def test_autoround_is_never_worse_than_its_start(layer: Layer) -> None:
    """On the window that training does not see."""
    windows: tuple[Tensor, ...] = layer.x.split(30)

    def run(weights: dict[str, Tensor], window: int) -> Tensor:
        return windows[window] @ weights["layer"].t()

    weights, start = {"layer": layer.weight}, {"layer": compensated(layer)}

    def error(value: Calibrated) -> float:
        exact, found = (run({"layer": weight}, 3) for weight in (layer.weight, value.dequantize()))
        smallest = torch.finfo(torch.float32).tiny
        return float(((found - exact).square().sum(-1) / exact.square().sum(-1).clamp(min=smallest)).mean())

    found = autoround(run, weights, 4, layer.grid, start=start, steps=8)["layer"]  # type: ignore[arg-type]
    assert error(found) <= error(start["layer"]) * (1 + ROUNDING) + ROUNDING**2


WITHOUT_COMPENSATION = {
    "awq+gptq": "awq",
    "smoothquant+gptq": "smoothquant",
    "smoothquant-search+gptq": "smoothquant-search",
}


@pytest.mark.parametrize("name", WITHOUT_COMPENSATION)
def test_gptq_gains_after_folding(seed: int, name: str) -> None:
    """Each layer's output error on the calibration inputs; GPTQ is greedy, so a layer of few channels may lose."""
    model, windows = llama().eval(), [torch.randint(0, VOCABULARY, (1, 40)) for _ in range(8)]
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight[::7] *= 10
            block.post_attention_layernorm.weight[::7] *= 10

    def errors(algorithm: str) -> Tensor:
        blocks = calibrate(copy.deepcopy(model), windows, Grid(3, -1), ALGORITHMS[algorithm])
        return torch.tensor([list(block.errors.values()) for block in islice(blocks, 1)])[0]

    compensated, plain = errors(name), errors(WITHOUT_COMPENSATION[name])
    assert compensated.log().mean() < plain.log().mean()
    assert ((compensated < plain).sum() + 1) >= len(plain)
