"""AutoRound: the block's error falls and is never above rounding to nearest; what it made reloads bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from epiloq.formats.io.model import from_directory
from epiloq.quantize import Float8Grid, Grid, autoround, rtn
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.ranks import Ranks
from epiloq.quantize.job import perform, prepare
from epiloq.quantize.settings import Settings
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
    return float(sum((run(rounded, i) - run(weights, i)).square().mean() for i in range(5)))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group", "part"), [(2, 16, 0.9), (3, -1, 0.95), (4, 7, 1)])
def test_error_falls(seed: int, bits: int, group: int, part: float, symmetric: bool) -> None:
    run, weights = problem()
    grid = Grid(bits, group, symmetric)
    nearest = {name: rtn(weight, grid) for name, weight in weights.items()}
    untrained = autoround(run, weights, 5, grid, steps=0)
    for name, value in untrained.items():
        assert torch.equal(value.dequantize(), nearest[name].dequantize())
    found = autoround(run, weights, 5, grid, steps=40, seed=seed)
    again = autoround(run, weights, 5, grid, steps=40, seed=seed)
    assert error(run, weights, found) <= part * error(run, weights, nearest)
    for name, value in found.items():
        assert torch.equal(value.q, again[name].q) and torch.equal(value.scale, again[name].scale)
        assert value.q.min() >= grid.lowest and value.q.max() <= grid.highest and value.q.dtype == grid.dtype
        assert symmetric or (value.zero.min() >= 0 and value.zero.max() <= grid.highest)


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


@pytest.mark.parametrize("algorithm", ["autoround", "gptq-guided", "gptq+refine"])
def test_reloads_bit_for_bit(seed: int, tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "autoround", AUTOROUND)
    monkeypatch.setattr("epiloq.quantize.streaming.streamed", lambda *_: "the model is looked at afterwards")
    model = tiny_model(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    source = save(tmp_path / "model", model)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    settings = Settings(
        source, tmp_path / "out", "w4a16-g32", algorithm, calibration=tmp_path / "text.txt", count=4, length=80
    )
    job = prepare(settings)
    perform(job)
    found = from_directory(tmp_path / "out")
    layers = [n for n, m in job.model.named_modules() if isinstance(m, nn.Linear) and "layers" in n]
    assert len(layers) == 14
    for name in layers:
        restored: Any = found.get_submodule(name)
        assert torch.equal(restored.dequantized_weight().float(), job.model.get_submodule(name).weight.float())


def test_refused(seed: int, tmp_path: Path) -> None:
    run, weights = problem()
    for wrong, said in (({"steps": -1}, "steps"), ({"batch": 0}, "batch"), ({"windows": 0}, "windows")):
        with pytest.raises(ValueError, match=f"{said}: expected"):
            autoround(run, weights, **{"windows": 5, "grid": Grid(3)} | wrong)
    with pytest.raises(ValueError, match="finite"):
        autoround(run, {"up": weights["up"] * float("inf")}, 5, Grid(3))
    with pytest.raises(ValueError, match="fp8-block has not"):
        prepare(Settings(save(tmp_path / "model", tiny_model()), tmp_path / "out", "fp8-block", "autoround"))
    windows = [torch.randint(0, VOCABULARY, (1, 12))]
    with pytest.raises(ValueError, match="expected integers"):
        calibrate(llama(), windows, Float8Grid(), AUTOROUND)
    several = Ranks()
    several.world = 2
    with pytest.raises(ValueError, match="expected one process"):
        calibrate(llama(), windows, Grid(3), AUTOROUND, ranks=several)
