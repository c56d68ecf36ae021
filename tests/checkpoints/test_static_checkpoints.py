"""Checkpoints with static int8 activations: written, read here and by compressed-tensors, and checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from command_line import ROUND, letters, run
from epiloq.formats.configs import compressed_tensors as ct_config
from epiloq.formats.description import of_grid
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts import compressed_tensors
from epiloq.formats.layouts.base import FormatError, Quantization
from epiloq.formats.layouts.compressed_tensors import INTEGER
from epiloq.nn import Int8Linear
from epiloq.quantize import Grid, rtn
from epiloq.weights.grid import InputGrid
from reference import typical_error
from tiny_teacher import save, tiny_model

INT8 = Grid(8, symmetric=True)
KEPT = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static")
    save(folder / "model", tiny_model(**ROUND))
    (folder / "text").write_text(letters(1500))
    options = ("--scheme", "w8a8-int8-static", "--algorithm", "smoothquant-search", "--keep-dynamic", KEPT)
    text = ("--calibration", folder / "text", "--windows", 8, "--length", 32)
    result = run("quantize", folder / "model", *options, *text, "--output", folder / "out")
    assert result.exit_code == 0 and KEPT in result.output, result.output
    return folder


@torch.no_grad()
def logits(model: Any, made: Path) -> torch.Tensor:
    """On text like that of the calibration: other text may leave the ranges."""
    tokens = transformers.AutoTokenizer.from_pretrained(made / "model")((made / "text").read_text())["input_ids"]
    return model(torch.tensor([tokens[700:750]]), use_cache=False).logits  # type: ignore[no-any-return]


def changed(made: Path, folder: Path, tensors: dict[str, torch.Tensor | None]) -> Path:
    """The checkpoint with other tensors; None removes one."""
    folder.mkdir()
    for file in (made / "out").glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    found = {**load_file(made / "out" / "model.safetensors"), **tensors}
    save_file({name: value for name, value in found.items() if value is not None}, folder / "model.safetensors")
    return folder


def test_static_layers_use_their_scales(made: Path) -> None:
    model, quantization = models.load(Checkpoint(made / "out"))
    assert quantization == Quantization(INT8, "int8-static", (KEPT,))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    assert len(layers) == 14 and all(not layer.symmetric for layer in layers.values())
    assert {name for name, layer in layers.items() if layer.activation == "dynamic"} == {KEPT}
    tensors = load_file(made / "out" / "model.safetensors")
    for name, layer in layers.items():
        if name != KEPT:
            assert layer.input_scale is not None and layer.input_zero_point is not None and layer.input_scale > 0
            assert torch.equal(layer.input_scale, tensors[f"{name}.input_scale"])
            assert int(layer.input_zero_point) == int(tensors[f"{name}.input_zero_point"])
    exact = logits(models.load_float(Checkpoint(made / "model")), made)
    # Random weights: 0.03 to 0.17, as the ranges of their inputs fall. A wrong model is off by more than 1.
    assert typical_error(logits(model, made), exact) < 0.5


def test_compressed_tensors_understands_them(made: Path) -> None:
    """Its own choice of a scheme for each layer, and its own rounding of inputs."""
    schemas = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    described = json.loads((made / "out" / "config.json").read_text())["quantization_config"]
    theirs = models.load_float(Checkpoint(made / "model"))
    schemas.apply_quantization_config(theirs, schemas.QuantizationConfig.model_validate(described))
    found = {name: getattr(module, "quantization_scheme", None) for name, module in theirs.named_modules()}
    inputs = {name: scheme.input_activations for name, scheme in found.items() if scheme is not None}
    assert len(inputs) == 14 and {name for name, args in inputs.items() if args.dynamic} == {KEPT}
    layer = models.load(Checkpoint(made / "out"))[0].get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, Int8Linear) and layer.input_scale is not None and layer.input_zero_point is not None
    x = torch.randn(50, 96) * layer.input_scale * 60
    args = inputs["model.layers.0.mlp.down_proj"]
    simulated = forward.fake_quantize(x, layer.input_scale, layer.input_zero_point.to(torch.int8), args)
    weight = layer.weight.dequantize()
    torch.testing.assert_close(layer(x), simulated @ weight.t(), rtol=1e-4, atol=1e-4)


def test_layouts_round_trip_in_their_schema(seed: int) -> None:
    static_one, dynamic_one = (of_grid(Quantization(INT8, kind), INTEGER) for kind in ("int8-static", "int8-azp"))
    grid = InputGrid(torch.tensor([0.037]), torch.tensor([-117], dtype=torch.int32))
    value = replace(rtn(torch.randn(24, 40), INT8), inputs=grid)
    tensors = compressed_tensors.to_tensors(value, static_one, torch.float32)
    assert tensors["input_zero_point"].dtype == torch.int8
    again = compressed_tensors.from_tensors(tensors, static_one, (24, 40)).inputs
    assert again is not None and torch.equal(again.scale, grid.scale) and torch.equal(again.zero, grid.zero)
    layers = {"a.a": static_one, "a.b": dynamic_one, "a.c": dynamic_one, "a.d": static_one, "a.e": static_one}
    config = ct_config.config(layers, ["lm_head"])
    rules = ct_config.parse(json.loads(json.dumps(config)))
    assert {name: rules([name], nn.Linear) for name in layers} == layers
    schemas = pytest.importorskip("compressed_tensors.quantization")
    groups = schemas.QuantizationConfig.model_validate(config).config_groups
    static, dynamic = (groups[name].input_activations for name in ("group_0", "group_1"))
    assert (static.strategy, static.dynamic, static.symmetric) == ("tensor", False, False)
    assert (dynamic.strategy, dynamic.dynamic, dynamic.symmetric) == ("token", True, False)
    assert groups["group_1"].targets == ["a.b", "a.c"]


def test_symmetric_scales_of_other_tools(seed: int) -> None:
    value = rtn(torch.randn(8, 16), INT8)
    tensors = {"weight": value.q, "weight_scale": value.scale, "input_scale": torch.tensor([0.5])}
    found = compressed_tensors.from_tensors(
        tensors, of_grid(Quantization(INT8, "int8-static"), INTEGER), (8, 16)
    ).inputs
    assert found is not None and float(found.scale) == 0.5 and int(found.zero) == 0


def test_scales_that_disagree_with_the_configuration(made: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({f"{name}.input_scale": None, f"{name}.input_zero_point": None}, r"input_scale.*expected"),
        ({f"{KEPT}.input_scale": torch.ones(1)}, "expected of a layer .*, got input_scale"),
        ({f"{name}.input_scale": torch.ones(2)}, "input_scale"),
        ({f"{name}.input_zero_point": torch.ones(1)}, "input_zero_point"),
    ]
    for index, (tensors, message) in enumerate(cases):
        with pytest.raises(FormatError, match=message):
            models.load(Checkpoint(changed(made, tmp_path / str(index), tensors)))


@pytest.mark.parametrize(
    "change",
    [
        {"input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}},
        {"input_activations": {"num_bits": 4, "strategy": "token", "dynamic": True}},
        {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
        {"format": "float-quantized"},
    ],
)
def test_other_groups_are_refused(change: dict[str, Any]) -> None:
    static_one, dynamic_one = (of_grid(Quantization(INT8, kind), INTEGER) for kind in ("int8-static", "int8-azp"))
    config = ct_config.config({"b": static_one, "a": dynamic_one}, [])
    config["config_groups"]["group_1"] |= change
    with pytest.raises(FormatError, match="compressed-tensors"):
        ct_config.parse(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--scheme", "w8a8-int8", "--algorithm", "rtn", "--keep-dynamic", "auto"),
            "--keep-dynamic: expected",
        ),
        (("--scheme", "w8a8-int8-static", "--algorithm", "rtn"), "needs calibration text"),
        (("--scheme", "w8a8-int8-static", "--alpha", "1.5"), "alpha"),
    ],
)
def test_invalid_requests(made: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = run("quantize", made / "model", "--output", tmp_path / "out", *options)
    assert result.exit_code in (1, 2) and message in result.output
    assert list(tmp_path.iterdir()) == []
