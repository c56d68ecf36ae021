"""Scales of activations that calibration fixes: their values, what they cost each layer, and which layers are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from epiloq.quantize import Grid, rtn, search_smooth_scale, smooth_scale
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.static import (
    AUTO,
    LARGEST_ERROR,
    InputWatch,
    Static,
    dynamic_int8,
    input_grid,
    static_int8,
    token_error,
)
from epiloq.quantize.calibration.work import Block
from toy_language_model import IN_BLOCKS, LanguageModel

INT8 = Grid(8, symmetric=True)


def through_int8(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """x on the grid of 256 points that spans low to high and has zero among them, in float64."""
    step = (high - low) / 255
    zero = np.clip(np.round(-128 - low / step), -128, 127)
    return (np.clip(np.round(x / step) + zero, -128, 127) - zero) * step


def outlying(tokens: int, channels: int) -> Tensor:
    """Tokens of ordinary size but for a few that are 200 times larger, as some layers of language models see them."""
    x = torch.randn(tokens, channels)
    x[::29] *= 200
    return x


@pytest.mark.parametrize(("low", "high"), [(-1.5, 4.0), (0.25, 3.0), (-7.0, -2.0), (-1e-3, 1e-3), (-3.0, 900.0)])
def test_a_grid_spans_the_inputs_and_zero(seed: int, low: float, high: float) -> None:
    grid = input_grid(torch.tensor(low), torch.tensor(high))
    assert grid.scale.shape == grid.zero.shape == (1,)
    assert (grid.scale.dtype, grid.zero.dtype) == (torch.float32, torch.int32)
    x = torch.linspace(low, high, 501).reshape(3, 167)
    error = (static_int8(x, grid) - x).abs().max()
    assert error <= 1.001 * grid.scale / 2  # A zero point that was rounded shifts the ends by less than half a step.
    assert not static_int8(torch.zeros(1, 8), grid).any()
    assert float(grid.scale) == pytest.approx((max(high, 0) - min(low, 0)) / 255, rel=1e-5)


def test_non_finite_values_have_no_grid() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            input_grid(torch.tensor(-1.0), torch.tensor(bad))


def test_token_error_is_the_mean_over_tokens(seed: int) -> None:
    x, weight = outlying(100, 17), torch.randn(9, 17)
    x[5] = 0  # Has no relative error.
    low, high = x.min().numpy(), x.max().numpy()
    exact, w = x.double().numpy(), weight.double().numpy()
    fixed = through_int8(exact, np.float64(low), np.float64(high))
    ends = exact.min(1, keepdims=True).clip(max=0), exact.max(1, keepdims=True).clip(min=0)
    with np.errstate(invalid="ignore"):
        each = np.nan_to_num(through_int8(exact, *ends))
    grid = input_grid(x.min(), x.max())
    for quantised, reference in ((static_int8(x, grid), fixed), (dynamic_int8(x), each)):
        rows = np.delete(np.arange(100), 5)
        part = np.linalg.norm((reference - exact)[rows] @ w.T, axis=1) / np.linalg.norm(exact[rows] @ w.T, axis=1)
        assert token_error(x, quantised, weight) == pytest.approx(float(np.sqrt((part**2).mean())), rel=0.02)
    assert token_error(x, static_int8(x, grid), weight) > 5 * token_error(x, dynamic_int8(x), weight)
    assert token_error(torch.zeros(3, 17), torch.zeros(3, 17), weight) == 0


def watched(layers: dict[str, nn.Linear], batches: list[Tensor], groups: list[list[str]]) -> InputWatch:
    watch = InputWatch(groups, layers)
    with watch.attached():
        for x in batches:
            for layer in layers.values():
                layer(x)
    return watch


def frozen(watch: InputWatch, layers: dict[str, nn.Linear], wish: Static) -> tuple[dict[str, Any], dict[str, Any]]:
    return watch.freeze({name: rtn(layer.weight.detach(), INT8) for name, layer in layers.items()}, wish)


def test_the_range_is_of_all_batches(seed: int) -> None:
    layers = {"a": nn.Linear(16, 8), "b": nn.Linear(16, 24)}
    batches = [torch.randn(2, 5, 16) * (1 + i) for i in range(7)]
    grids, errors = frozen(watched(layers, batches, [["a", "b"]]), layers, Static())
    whole = torch.cat([x.reshape(-1, 16) for x in batches])
    expected = input_grid(whole.min(), whole.max())
    for grid in grids.values():
        assert torch.equal(grid.scale, expected.scale) and torch.equal(grid.zero, expected.zero)
    assert grids["a"].scale.data_ptr() != grids["b"].scale.data_ptr()
    assert errors["a"] == errors["b"] and not errors["a"].kept_dynamic


def test_layers_that_no_input_reaches(seed: int) -> None:
    """An expert, say: dynamic where a layer may be, else refused with what helps."""
    layers = {"experts.0": nn.Linear(16, 8), "experts.1": nn.Linear(16, 8)}
    watch = InputWatch([[name] for name in layers], layers)
    with watch.attached():
        layers["experts.0"](torch.randn(9, 16))
    for wish in (None, "experts.0"):
        with pytest.raises(ValueError, match=r"experts\.1: expected inputs to calibrate static scales, got none"):
            frozen(watch, layers, Static(wish))
    for wish in (AUTO, "*.1"):
        grids, errors = frozen(watch, layers, Static(wish))
        assert set(grids) == {"experts.0"} and errors["experts.1"].kept_dynamic


def test_keep_dynamic_selects_layers(seed: int) -> None:
    layers = {f"{i}.{leaf}": nn.Linear(32, 16) for i in range(2) for leaf in ("up", "down")}
    even, outliers = torch.randn(300, 32), outlying(300, 32)
    watch = InputWatch([[name] for name in layers], layers)
    with watch.attached():
        for name, layer in layers.items():
            layer(outliers if name == "1.down" else even)
    kept = {}
    for wish in (None, AUTO, "*.down", "0.*", "absent"):
        grids, errors = frozen(watch, layers, Static(wish))
        kept[wish] = {name for name, found in errors.items() if found.kept_dynamic}
        assert set(grids) == set(layers) - kept[wish]
    assert kept == {
        None: set(),
        AUTO: {"1.down"},
        "*.down": {"0.down", "1.down"},
        "0.*": {"0.up", "0.down"},
        "absent": set(),
    }
    assert errors["1.down"].static > LARGEST_ERROR > errors["1.up"].static > errors["1.up"].dynamic


def test_layer_without_inputs_is_named(seed: int) -> None:
    layers = {"a": nn.Linear(4, 4), "idle": nn.Linear(4, 4)}
    watch = InputWatch([["a"], ["idle"]], layers)
    with watch.attached():
        layers["a"](torch.randn(3, 4))
        layers["idle"](torch.randn(0, 4))
    with pytest.raises(ValueError, match="idle"):
        frozen(watch, layers, Static())


def walk(model: nn.Module, algorithm: str, static: Static | None, **options: Any) -> dict[str, Block]:
    windows = [torch.randint(0, 33, (1, 12), generator=torch.Generator().manual_seed(i)) for i in range(6)]
    walked = calibrate(model, windows, INT8, ALGORITHMS[algorithm], static=static, **options)
    return {block.name: block for block in walked}


@pytest.mark.parametrize(
    "algorithm", ["rtn", "smoothquant", "smoothquant-search", "smoothquant+gptq", "smoothquant-search+gptq"]
)
def test_a_walk_fixes_the_scales_of_the_quantised_model(seed: int, algorithm: str) -> None:
    """The model ends with its quantised weights, so running it again shows the inputs that the scales are for."""
    model = LanguageModel().eval()
    weights = {n: w for block in walk(model, algorithm, Static("*.2.up")).values() for n, w in block.weights.items()}
    layers = {name: model.get_submodule(name) for name in IN_BLOCKS}
    ends: dict[str, list[Tensor]] = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda m, a, seen=ends[name]: seen.append(a[0]))
    for i in range(6):
        model(torch.randint(0, 33, (1, 12), generator=torch.Generator().manual_seed(i)))
    for name, weight in weights.items():
        if name == "blocks.2.up":
            assert weight.inputs is None
            continue
        x = torch.cat(ends[name])
        expected = input_grid(x.min(), x.max())
        assert weight.inputs is not None
        torch.testing.assert_close(weight.inputs.scale, expected.scale, rtol=1e-5, atol=0)
        assert abs(int(weight.inputs.zero) - int(expected.zero)) <= 1


def test_no_static_scales_by_default(seed: int) -> None:
    for block in walk(LanguageModel().eval(), "gptq", None).values():
        assert not block.input_errors and all(weight.inputs is None for weight in block.weights.values())


def test_static_scales_need_windows_and_alpha_its_range(seed: int) -> None:
    with pytest.raises(ValueError, match=r"windows.*static"):
        calibrate(LanguageModel().eval(), [], INT8, ALGORITHMS["rtn"], static=Static())
    with pytest.raises(ValueError, match="alpha"):
        walk(LanguageModel().eval(), "smoothquant", None, alpha=1.5)


def test_the_search_for_static_scales_beats_any_alpha(seed: int) -> None:
    x, weights = torch.randn(200, 48), [torch.randn(20, 48), torch.randn(12, 48)]
    x[:, ::11] *= 30
    amax, w = x.abs().amax(0), torch.cat(weights)

    def error(scale: Tensor) -> float:
        """In float64: weights per channel, one scale for all inputs."""
        scaled, rows = (x / scale).double().numpy(), (w * scale).double().numpy()
        step = 2 * np.abs(rows).max(1, keepdims=True) / 255
        weight = np.clip(np.round(rows / step), -128, 127) * step
        reach = np.float64((amax / scale).max())
        lost = (through_int8(scaled, -reach, reach) - scaled) @ weight.T
        return float(((lost**2).sum(1) / ((scaled @ weight.T) ** 2).sum(1)).mean())

    found = error(search_smooth_scale(x, amax, weights, static=True))
    assert found <= 1.05 * min(error(smooth_scale(amax, weights, alpha)) for alpha in (0.3, 0.5, 0.7, 0.9))
    assert found < 0.5 * error(torch.ones(48))


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["rtn", "smoothquant-search"])
def test_scales_are_fixed_on_a_gpu_too(seed: int, algorithm: str) -> None:
    """Sums in another order move the ranges a little; scales follow them."""
    model = LanguageModel().eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = {n: w for block in walk(model, algorithm, Static("*.2.up")).values() for n, w in block.weights.items()}
    model.load_state_dict(state)
    found = {
        n: w
        for block in walk(model, algorithm, Static("*.2.up"), device="cuda").values()
        for n, w in block.weights.items()
    }
    for name, weight in expected.items():
        inputs = found[name].inputs
        assert (inputs is None) == (weight.inputs is None)
        if inputs is not None and weight.inputs is not None:
            torch.testing.assert_close(inputs.scale.cpu(), weight.inputs.scale, rtol=0.02, atol=0)
            assert abs(int(inputs.zero) - int(weight.inputs.zero)) <= 2
