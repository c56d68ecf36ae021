"""``epiloq quantize`` of bad models and bad requests: a sentence, exit code 2, and nothing touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from command_line import quantize, run, text
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from tiny_teacher import save


def broken(teacher: Path, folder: Path, how: str) -> Path:
    """A copy of the teacher with something wrong."""
    shutil.copytree(teacher, folder)
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if how == "no tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "missing shard":
        weights.rename(folder / "model-00001-of-00002.safetensors")
        names = list(load_file(folder / "model-00001-of-00002.safetensors"))
        weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors") | {
            names[0]: "model-00002-of-00002.safetensors"
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    elif how == "outside":
        weight_map = {name: "../model/model.safetensors" for name in load_file(weights)}
        weights.unlink()  # beside an index it would be refused for itself
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    elif how == "other config":
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    elif how == "more layers":
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    elif how == "unknown model":
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    elif how == "no linear":
        return save(
            folder.with_name("gpt2"),
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=0, n_embd=24, n_head=2)),
        )
    elif how == "nan":
        tensors = load_file(weights)
        tensors["model.layers.0.input_layernorm.weight"][3] = torch.nan
        save_file(tensors, weights, {"format": "pt"})
    elif how == "pickle":
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "damaged safetensors file"),
        ("missing shard", "model-00002-of-00002.safetensors: missing"),
        ("outside", "expected safetensors files next to it"),
        ("other config", "disagree|mismatch|size"),
        ("more layers", "config.json disagrees with the tensors: expected"),
        ("unknown model", "NoSuchModel"),
        ("no linear", "found none"),
        ("nan", "finite"),
        ("pickle", "expected model.safetensors"),
        ("no tokenizer", "no tokenizer"),
    ],
)
def test_broken_models_are_refused(teacher: Path, tmp_path: Path, how: str, message: str) -> None:
    import re

    folder = broken(teacher, tmp_path / "broken", how)
    before = sorted(tmp_path.iterdir())
    result = quantize(folder, tmp_path / "out", "--scheme", "w4a16-g32", "--calibration", str(text(teacher)))
    assert result.exit_code == 2, result.output
    assert re.search(message, result.output), result.output
    assert len(result.output.strip().splitlines()[-1]) < 400 and not (tmp_path / "out").exists()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheme", "w3a16"), "w4a16-g64"),
        (("--scheme", "w4a16-g32", "--algorithm", "magic"), "smoothquant"),
        (("--scheme", "w4a16-g32", "--format", "gguf"), "compressed-tensors"),
        (("--scheme", "w4a16-g128", "--format", "awq"), "multiple of 128"),
        (("--scheme", "w8a8-int8", "--format", "awq"), "activations"),
        (("--scheme", "w8a16", "--format", "awq"), "4 bits"),
        (("--scheme", "w4a16-g32", "--calibration", "absent.txt"), "found neither"),
        (("--scheme", "w4a16-g32", "--blocks", "model.norm"), "ModuleList"),
        (("--scheme", "w4a16-g32", "--device", "quantum"), "expected auto, cpu"),
    ],
)
def test_invalid_requests_write_nothing(teacher: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = quantize(teacher, tmp_path / "out", *options)
    assert result.exit_code == 2 and message in result.output, result.output
    assert list(tmp_path.iterdir()) == []


def test_existing_output_and_missing_text(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    result = quantize(teacher, tmp_path / "out", "--scheme", "w4a16-g32")
    assert result.exit_code == 2 and "exists" in result.output
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "precious"]
    result = run("quantize", teacher, "--scheme", "w4a16-g32", "--output", tmp_path / "new")
    assert result.exit_code == 2 and "calibration" in result.output


def test_quantised_directories_are_checked(teacher: Path, tmp_path: Path) -> None:
    assert quantize(teacher, tmp_path / "out", "--scheme", "w4a16-g32").exit_code == 0
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    assert quantize(tmp_path / "out", tmp_path / "twice", "--scheme", "w4a16-g32").exit_code == 2
    layer = "model.layers.0.mlp.up_proj"
    for name, value, message in (
        (f"{layer}.weight_packed", tensors[f"{layer}.weight_packed"][:-1], "weight_packed"),
        (f"{layer}.weight_scale", None, "weight"),
        ("model.norm.weight", None, "model.norm.weight"),
        ("model.norm.weight", torch.ones(3), "model.norm.weight"),
        ("model.extra", torch.ones(3), "not a tensor of this model"),
    ):
        changed = {n: t for n, t in tensors.items() if n != name} | ({} if value is None else {name: value})
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(FormatError, match=message):
            models.load(Checkpoint(tmp_path / "out"))


@pytest.mark.parametrize(
    "options",
    [
        ("--scheme", "w8a8-int8", "--algorithm", "smoothquant"),
        ("--scheme", "w8a8-int8-static", "--algorithm", "rtn"),
        ("--scheme", "w4a16-g32", "--algorithm", "awq"),
        ("--bits", 5),
    ],
    ids=["smoothquant", "static", "awq", "budget"],
)
def test_inputs_that_overflow_are_named(teacher: Path, tmp_path: Path, options: tuple[object, ...]) -> None:
    """Those of one layer, of weights that are finite."""
    shutil.copytree(teacher, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"][5] *= 1e25
    save_file(tensors, weights, {"format": "pt"})
    shutil.copy(text(teacher), tmp_path / "text.txt")
    result = quantize(tmp_path / "model", tmp_path / "out", *options)
    assert result.exit_code == 2, result.output
    assert "layers.1.mlp.down_proj: quantize: inputs: expected finite numbers" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()
