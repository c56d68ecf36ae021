"""Directories whose scales contain NaN or infinity, or divisors zero: opening names file, layer and tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="models of transformers need the extra hf")

import transformers
from safetensors.torch import load_file, save_file

import epiloq
import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from command_line import ROUND, run
from epiloq.formats import epiloq_modules
from epiloq.formats.io import model as models
from epiloq.formats.layouts.base import FormatError
from foreign_variants import VARIANTS
from tiny_teacher import tiny_model

integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def poisoned(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    bad = tensors[name].float().clone()
    bad.view(-1)[-1] = value
    save_file(tensors | {name: bad.to(tensors[name].dtype)}, folder / "model.safetensors", {"format": "pt"})


def refused_everywhere(folder: Path, layer: str, part: str, text: str, other: str = "epiloq") -> None:
    message = rf"model\.safetensors: {layer}(\.{part})?: {part}: {text}"
    with pytest.raises(FormatError, match=message):
        models.from_directory(folder)
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    for command in (("inspect", folder, "--check"), ("convert", folder, folder.with_name("out"), "--format", other)):
        result = run(*command)
        assert result.exit_code == 2 and f"{part}: " in result.output, result.output
    assert not (folder.with_name("out")).exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("tool", "layer", "part"),
    [
        ("gptq", UP, "scales"),
        ("awq", UP, "scales"),
        ("pack-quantized", UP, "weight_scale"),
        ("static int-quantized", UP, "input_scale"),
        ("fp8", UP, "weight_scale_inv"),
        ("fp8 per tensor, static", UP, "input_scale"),
        ("fbgemm_fp8", DOWN, "weight_scale"),
    ],
)
def test_other_tools(seed: int, tmp_path: Path, tool: str, layer: str, part: str, value: float) -> None:
    written: Any = VARIANTS.get(tool)
    if written is None:
        foreign.write(tmp_path / "model", foreign.llama(), tool, shards=1)
    else:
        foreign.write_as(tmp_path / "model", foreign.llama(), *written, shards=1)
    poisoned(tmp_path / "model", f"{layer}.{part}", value)
    refused_everywhere(tmp_path / "model", layer, part, "expected finite numbers, got NaN or infinity")


@pytest.mark.parametrize(
    ("scheme", "other"),
    [("w8a8-int8", "compressed-tensors"), ("w4a16-g32", "compressed-tensors"), ("fp8-block", "deepseek-fp8")],
)
def test_own_format(tmp_path: Path, scheme: str, other: str) -> None:
    model = epiloq.quantize_(tiny_model(**ROUND), scheme)
    part = "weight_scale_inv" if scheme == "fp8-block" else "weight_scale"
    epiloq_modules.save(model, tmp_path / "model")
    poisoned(tmp_path / "model", f"{UP}.{part}", math.nan)
    text = "expected finite numbers, got NaN or infinity"
    refused_everywhere(tmp_path / "model", UP, part, text, other)


@pytest.mark.parametrize("value", [0.0, -2.0])
def test_divisors_of_own_format(tmp_path: Path, value: float) -> None:
    epiloq_modules.save(epiloq.quantize_(tiny_model(**ROUND), "w4a16-nvfp4"), tmp_path / "model")
    poisoned(tmp_path / "model", f"{UP}.weight_global_scale", value)
    text = f"expected a positive number, got {value}"
    refused_everywhere(tmp_path / "model", UP, "weight_global_scale", text, "compressed-tensors")


def test_powers_of_two(tmp_path: Path) -> None:
    """E8M0 has no infinity, and one code for NaN."""
    model = epiloq.quantize_(tiny_model(**ROUND), "w4a16-mxfp4")
    epiloq_modules.save(model, tmp_path / "own")
    result = run("convert", tmp_path / "own", tmp_path / "model", "--format", "compressed-tensors")
    assert result.exit_code == 0, result.output
    tensors = load_file(tmp_path / "model" / "model.safetensors")

    def bad(scale: Tensor) -> Tensor:
        return scale.clone().index_fill_(1, torch.tensor([0]), 255)

    name = f"{UP}.weight_scale"
    save_file(tensors | {name: bad(tensors[name])}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    refused_everywhere(tmp_path / "model", UP, "weight_scale", r"expected powers of two, got NaN \(255\)")
