"""Directories in AutoAWQ's versions gemv and gemv_fast, packed without epiloq's code: what commands make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

from safetensors.torch import load_file, save_file

import foreign_checkpoints as foreign
from command_line import letters, run
from epiloq.formats import convert
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import WeightOnlyLinear
from rounded_models import same, weights
from tiny_teacher import save, tiny_model

VERSIONS = {"awq gemv": {"compressed-tensors", "gptq", "awq", "epiloq"}, "awq gemv_fast": {"epiloq"}}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
"""Which tiles of 64 columns fill."""
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(seed: int, tmp_path: Path, version: str) -> Path:
    foreign.write(tmp_path / "in", tiny_model(**SIZES), version, shards=1)
    return tmp_path / "in"


def test_values(seed: int, tmp_path: Path, version: str) -> None:
    exact = foreign.write(tmp_path / "in", tiny_model(**SIZES), version)
    model, quantization = models.load(Checkpoint(tmp_path / "in"))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, WeightOnlyLinear)}
    assert len(layers) == 14 and (quantization is None) == (version == "awq gemv_fast")
    for name, layer in layers.items():
        assert torch.equal(layer.weight.dequantize(), exact.get_parameter(f"{name}.weight")), name


def test_inspected_and_evaluated(folder: Path, version: str, tmp_path: Path) -> None:
    assert run("inspect", folder, "--check", "--json", tmp_path / "i.json").exit_code == 0
    found = json.loads((tmp_path / "i.json").read_text())
    assert (found["format"], found["scheme"], found["wrong"]) == ("awq", "w4a16-g32", {})
    assert found["version"].lower() == version.removeprefix("awq ")
    assert {(row["weights"], row["group_size"], row["symmetric"]) for row in found["kinds"]} == {("int4", 32, False)}
    fitting = {name for name, reason in found["formats"].items() if reason is None}
    assert fitting == VERSIONS[version]
    save(tmp_path / "tokens", tiny_model(**SIZES))
    for file in (tmp_path / "tokens").glob("tokenizer*"):
        file.rename(folder / file.name)
    (tmp_path / "text.txt").write_text(letters(400))
    result = run("eval", folder, "--text", tmp_path / "text.txt", "--length", 32, "--json", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "e.json").read_text())["quantization"] == "awq"


def test_converted(folder: Path, version: str, tmp_path: Path) -> None:
    for target in sorted(VERSIONS[version] - {"awq"}):
        convert.perform(convert.prepare(folder, tmp_path / target, target))
        assert same(weights(tmp_path / target), weights(folder)), target
    for target in sorted({"compressed-tensors", "gptq"} - VERSIONS[version]):
        with pytest.raises(FormatError, match=r"cannot represent integers of 4 bits with a real offset"):
            convert.prepare(folder, tmp_path / target, target)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_tensors_that_disagree(folder: Path, part: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{UP}.{part}": tensors[f"{UP}.{part}"][:, 1:].contiguous()}, folder / "model.safetensors")
    with pytest.raises(FormatError, match=f"{UP}: {part}: expected"):
        models.load(Checkpoint(folder))


def test_groups_that_do_not_divide_the_layer(seed: int, tmp_path: Path) -> None:
    """The headers fit the model, and the layout does not."""
    foreign.write(tmp_path / "in", tiny_model(**SIZES), "awq gemv_fast", shards=1)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config["quantization_config"] |= {"group_size": 48}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="in_features: expected a multiple of 48"):
        models.load(Checkpoint(tmp_path / "in"))
