"""AutoRound: the block's error falls and is never above the start."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from epiloq.quantize import Float8Grid, Grid, autoround, gptq, rtn
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.ranks import Ranks
from epiloq.quantize.job import prepare
from epiloq.quantize.settings import Settings
from epiloq.weights.rounding import expand_parameters
from model_families import VOCABULARY, llama
from tiny_teacher import save, tiny_model

AUTOROUND = replace(ALGORITHMS["autoround"], learn=4)


def problem(rows: int = 20, channels: int = 50) -> tuple[Any, dict[str, Tensor]]:
    """Two layers with an activation between, on a few windows."""
    x = [torch.randn(40, channels // 3) @ torch.randn(channels // 3, channels) for _ in range(5)]
    weights = {"up": torch.randn(rows, channels), "down": torch.randn(12, rows)}
    return lambda w, i: torch.nn.functional.silu(x[i] @ w["up"].t() / 9) @ w["down"].t(), weights


def error(run: Any, weights: dict[str, Tensor], found: dict[str, Any]) -> float:
    rounded = {name: value.dequantize() for name, value in found.items()}
    pairs = [(run(rounded, i), run(weights, i)) for i in range(3)]
    return float(sum(((f - y).square().sum(-1) / y.square().sum(-1)).mean() for f, y in pairs))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group", "part"), [(2, 16, 0.9), (3, -1, 0.95), (4, 7, 1 + 1e-5)])
def test_error_falls(seed: int, bits: int, group: int, part: float, symmetric: bool) -> None:
    run, weights = problem()
    grid = Grid(bits, group, symmetric)
    nearest = {name: rtn(weight, grid) for name, weight in weights.items()}
    untrained = autoround(run, weights, 3, grid, steps=0)
    for name, value in untrained.items():
        assert torch.equal(value.dequantize(), nearest[name].dequantize())
    found = autoround(run, weights, 3, grid, steps=40, seed=seed)
    again = autoround(run, weights, 3, grid, steps=40, seed=seed)
    assert error(run, weights, found) <= part * error(run, weights, nearest)
    for name, value in found.items():
        assert torch.equal(value.q, again[name].q) and torch.equal(value.scale, again[name].scale)
        assert value.q.min() >= grid.lowest and value.q.max() <= grid.highest and value.q.dtype == grid.dtype
        assert symmetric or (value.zero.min() >= 0 and value.zero.max() <= grid.highest)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group", "part"), [(2, 16, 0.9), (3, -1, 0.95), (4, 7, 0.97)])
def test_autoround_starts_from_gptq(seed: int, bits: int, group: int, part: float, symmetric: bool) -> None:
    """Whose codes need not be the nearest ones, in groups of its own ranges; towards outputs given from outside."""
    run, weights = problem()
    x = [torch.randn(40, size) for size in (50, 20)]
    grid = Grid(bits, group, symmetric, torch.float16)
    start = {
        name: gptq(weight, inputs.t() @ inputs, grid, moments=inputs.square().mean(0))
        for (name, weight), inputs in zip(weights.items(), x, strict=True)
    }
    nearest = [grid.round(w, expand_parameters(start[name].parameters, grid, w.shape)) for name, w in weights.items()]
    assert any(not torch.equal(q, value.q) for q, value in zip(nearest, start.values(), strict=True))
    targets = [run(weights, i) + torch.randn(40, 12) / 20 for i in range(3)]

    def lost(found: dict[str, Any]) -> float:
        rounded = {name: value.dequantize() for name, value in found.items()}
        pairs = [(run(rounded, i), y) for i, y in enumerate(targets)]
        return float(sum(((f - y).square().sum(-1) / y.square().sum(-1)).mean() for f, y in pairs))

    # Other grids than that of the start are not looked at.
    untrained = autoround(run, weights, 3, Grid(8), targets=targets, start=start, steps=0)
    for name, value in untrained.items():
        assert torch.equal(value.q, start[name].q) and torch.equal(value.scale, start[name].scale)
        assert value.grid == grid and (symmetric or torch.equal(value.zero, start[name].zero))
    found = autoround(run, weights, 3, grid, targets=targets, start=start, steps=40, seed=seed)
    assert lost(found) <= part * lost(start)


def test_windows_that_training_does_not_see_decide(seed: int) -> None:
    """Outputs that no weights explain are learnt on four windows only, at the cost of the fifth."""
    run, weights = problem()
    targets = [run(weights, i) + (3 * torch.randn(40, 12) if i < 4 else 0) for i in range(5)]
    start = autoround(run, weights, 5, Grid(4, 16), targets=targets, steps=0)
    found = autoround(run, weights, 5, Grid(4, 16), targets=targets, steps=40, seed=seed)

    def lost(made: dict[str, Any]) -> float:
        rounded = {name: value.dequantize() for name, value in made.items()}
        return float((run(rounded, 4) - targets[4]).square().sum(-1).div(targets[4].square().sum(-1)).mean())

    assert lost(found) <= lost(start) * (1 + 1e-5)
    everything = autoround(run, weights, 3, Grid(4, 16), targets=targets[:3], steps=40, seed=seed)
    assert lost(everything) > lost(start)


def test_tokens_count_alike_whatever_their_size(seed: int) -> None:
    """A window of tokens a thousand times as large takes nothing from the others."""
    run, weights = problem()

    def scaled(w: dict[str, Tensor], i: int) -> Tensor:
        return run(w, i) * (1000 if i == 0 else 1)

    one, other = (autoround(r, weights, 5, Grid(3, 16), steps=20, seed=seed) for r in (run, scaled))
    differs = sum(int((one[name].q != other[name].q).sum()) for name in weights)
    assert differs <= 0.02 * sum(weight.numel() for weight in weights.values())


def test_scales_have_their_type(seed: int) -> None:
    run, weights = problem()
    for dtype in (torch.float16, torch.bfloat16):
        for value in autoround(run, weights, 5, Grid(3, 16, scale_dtype=dtype), steps=5).values():
            assert torch.equal(value.scale.to(dtype).float(), value.scale)


def test_a_layer_without_inputs_is_rounded_to_nearest(seed: int) -> None:
    run, weights = problem()
    idle = torch.randn(6, 50)
    found = autoround(run, weights | {"idle": idle}, 5, Grid(3, 16), steps=10)["idle"]
    assert torch.equal(found.dequantize(), rtn(idle, Grid(3, 16)).dequantize())


def test_blocks_of_a_model(seed: int) -> None:
    model, windows = llama().eval(), [torch.randint(0, VOCABULARY, (1, 12)) for _ in range(3)]
    exact = copy.deepcopy(model)
    blocks = list(calibrate(model, windows, Grid(3, -1), AUTOROUND))
    assert len(blocks) == 3 and all(0 < e < 1 for block in blocks for e in block.errors.values())
    for block in blocks:
        for name, weight in block.weights.items():
            assert torch.equal(weight.dequantize(), model.get_submodule(name).weight)
    assert all(not p.grad_fn and p.grad is None for p in model.parameters())
    first = "model.layers.0.input_layernorm.weight"
    assert torch.equal(model.get_parameter(first), exact.get_parameter(first))


def test_refused(seed: int, tmp_path: Path) -> None:
    run, weights = problem()
    for wrong, message in (({"steps": -1}, "steps"), ({"batch": 0}, "batch"), ({"windows": 0}, "windows")):
        with pytest.raises(ValueError, match=f"{message}: expected"):
            autoround(run, weights, **{"windows": 5, "grid": Grid(3)} | wrong)
    with pytest.raises(ValueError, match="targets: expected one for each of 5 windows, got 1"):
        autoround(run, weights, 5, Grid(3), targets=[torch.zeros(40, 12)])
    with pytest.raises(ValueError, match="finite"):
        autoround(run, {"up": weights["up"] * float("inf")}, 5, Grid(3))
    with pytest.raises(ValueError, match="targets: expected finite"):
        autoround(run, weights, 1, Grid(3), targets=[torch.full((40, 12), float("nan"))])
    with pytest.raises(ValueError, match="expected a scheme of integers with zero points, got fp8-block"):
        prepare(Settings(save(tmp_path / "model", tiny_model()), tmp_path / "out", "fp8-block", "autoround"))
    windows = [torch.randint(0, VOCABULARY, (1, 12))]
    with pytest.raises(ValueError, match="expected integers"):
        calibrate(llama(), windows, Float8Grid(), AUTOROUND)
    several = Ranks()
    several.world = 2
    with pytest.raises(ValueError, match="expected one process"):
        calibrate(llama(), windows, Grid(3), AUTOROUND, ranks=several)
