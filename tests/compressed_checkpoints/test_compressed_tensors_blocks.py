"""FP8 in blocks by the package compressed-tensors (its preset FP8_BLOCK), and caches that are quantised besides."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import epiloq
import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from command_line import WIDE, logits, quantize, run, teacher_and_text
from epiloq.formats import convert, deepseek_fp8
from epiloq.formats.configs import compressed_tensors as ct_config
from epiloq.formats.description import Description, Inputs
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp8BlockLinear
from rounded_models import same, weights
from tiny_teacher import save, tiny_model

# Other tests want transformers as it is.
integration.unregister()

UP = "model.layers.1.mlp.up_proj"
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_and_text(tmp_path_factory.mktemp("teacher"), WIDE)


def by_the_package(teacher: Path, folder: Path, dtype: torch.dtype) -> Path:
    """The teacher in the package's preset by the package's own functions, from the scheme to the files."""
    q = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = models.load_float(Checkpoint(teacher)).to(dtype)
    described = q.preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    q.apply_quantization_config(model, q.QuantizationConfig(config_groups={"group_0": described}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            blocks = module.weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scale, _ = helpers.calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), described.weights)
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def block_layers(model: nn.Module) -> dict[str, Fp8BlockLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8BlockLinear)}


@pytest.fixture
def even(tmp_path: Path) -> Path:
    """A teacher whose keys and values fill blocks too."""
    return save(tmp_path / "even", tiny_model(**(WIDE | {"num_key_value_heads": 4})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_by_the_package(even: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = by_the_package(even, tmp_path / "in", dtype)
    group = (Checkpoint(folder).quantization or {})["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["weights"]["block_structure"]) == ("block", [128, 128])
    assert (group["input_activations"]["strategy"], group["input_activations"]["group_size"]) == ("group", 128)
    model, quantization = models.load(Checkpoint(folder))
    layers, tensors = block_layers(model), load_file(folder / "model.safetensors")
    assert len(layers) == 14 and quantization is None
    for name, layer in layers.items():
        state = layer.file_state()
        assert torch.equal(state["weight"].view(torch.uint8), tensors[f"{name}.weight"].view(torch.uint8))
        assert tensors[f"{name}.weight_scale"].dtype == dtype
        assert torch.equal(state["weight_scale_inv"], tensors[f"{name}.weight_scale"].float())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_equal_layers(theirs, layers)


def check_equal_layers(theirs: nn.Module, layers: dict[str, Fp8BlockLinear]) -> None:
    """Each of their layers gives what ours gives on the same inputs, in float32."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in layers:
        theirs.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: (inputs[0], output)})
        )
    logits(theirs)
    for name, layer in layers.items():
        x, y = seen[name]
        torch.testing.assert_close(layer.float()(x), y, rtol=1e-5, atol=1e-5 * float(y.abs().max()))


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("tool", ["blocks", "blocks and a cache"])
def test_opened_and_saved_by_transformers(even: Path, tmp_path: Path, tool: str) -> None:
    folder = by_the_package(even, tmp_path / "in", torch.bfloat16)
    if tool == "blocks and a cache":
        with_a_cache(folder)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert len([w for w in warned if "key-value cache" in str(w.message)]) == (tool == "blocks and a cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read, _ = models.load(Checkpoint(folder))
        assert len(block_layers(found)) == 14 and torch.equal(logits(found), logits(read))
        found.save_pretrained(tmp_path / "again")
        assert Checkpoint(tmp_path / "again").quantization == Checkpoint(folder).quantization
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(logits(again), logits(found)) and same(weights(tmp_path / "again"), weights(folder))
    one, other = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one if name.endswith(("k_scale", "v_scale")))


def test_the_package_reads_what_epiloq_writes(teacher: Path, tmp_path: Path) -> None:
    schemas = pytest.importorskip("compressed_tensors.quantization")
    result = quantize(teacher, tmp_path / "out", "--scheme", "fp8-block", "--format", "compressed-tensors")
    assert result.exit_code == 0, result.output
    text = Checkpoint(tmp_path / "out").quantization
    assert text is not None
    group = schemas.QuantizationConfig.model_validate(text).config_groups["group_0"]
    preset = schemas.preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    for part in ("weights", "input_activations"):
        ours, theirs = (getattr(scheme, part) for scheme in (group, preset))
        for key in ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "block_structure"):
            assert getattr(ours, key) == getattr(theirs, key), (part, key)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    model, _ = models.load(Checkpoint(tmp_path / "out"))
    check_equal_layers(theirs, block_layers(model))
    values = weights(tmp_path / "out")
    assert len(block_layers(model)) == 14
    for name in block_layers(model):
        assert torch.equal(theirs.get_parameter(f"{name}.weight"), values[f"{name}.weight"]), name
    again = epiloq.quantize_(models.load_float(Checkpoint(teacher)), "fp8-block")
    assert torch.equal(logits(again), logits(model))


def test_converted_and_back(teacher: Path, tmp_path: Path) -> None:
    """Between the formats that have blocks, tensors and configurations come back bit for bit."""
    assert quantize(teacher, tmp_path / "0", "--scheme", "fp8-block", "--format", "compressed-tensors").exit_code == 0
    for step, layout in enumerate(("deepseek-fp8", "epiloq", "compressed-tensors")):
        result = run("convert", tmp_path / f"{step}", tmp_path / f"{step + 1}", "--format", layout)
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "1" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    assert (tmp_path / "0" / "config.json").read_text() == (tmp_path / "3" / "config.json").read_text()
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in "03")
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name].view(torch.uint8), last[name].view(torch.uint8)) for name in first)
    result = run("inspect", tmp_path / "3", "--check", "--json", tmp_path / "i.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "i.json").read_text())
    assert (found["format"], found["version"], found["scheme"]) == (
        "compressed-tensors",
        "float-quantized",
        "fp8-block",
    )
    fitting = {name for name, reason in found["formats"].items() if reason is None}
    assert fitting == {"deepseek-fp8", "compressed-tensors", "epiloq"}


@pytest.mark.parametrize("model", ["llama", "opt"])
def test_written_by_another_tool(seed: int, tmp_path: Path, model: str) -> None:
    """Of sizes that fill no block, as other engines than the package run them."""
    exact = foreign.write(tmp_path / "in", foreign.MODELS[model](), foreign.FP8_BLOCKS)
    for name in block_layers(models.load(Checkpoint(tmp_path / "in"))[0]):
        assert torch.equal(weights(tmp_path / "in")[f"{name}.weight"], exact.get_parameter(f"{name}.weight")), name


def test_partial_groups(tmp_path: Path) -> None:
    """Rows may end within a block; the package has no way to run inputs that end within a group."""
    odd = WIDE | {"intermediate_size": 200}
    with pytest.warns(UserWarning, match="dequantises"):
        deepseek_fp8.save(epiloq.quantize_(tiny_model(**odd), "fp8-block"), tmp_path / "in")
    with pytest.raises(FormatError, match=r"down_proj: .*in_features: expected a multiple of 128, got 200"):
        convert.prepare(tmp_path / "in", tmp_path / "out", "compressed-tensors")


def test_the_former_spelling_of_blocks() -> None:
    inputs = Inputs("fp8", "group", group_size=128)
    blocks = Description("float-quantized", "fp8", strategy="block", block=(128, 128), inputs=inputs)
    config = ct_config.config({"layer": blocks}, ["lm_head"])
    config["config_groups"]["group_0"]["weights"]["block_structure"] = "128x128"
    assert ct_config.parse(config)(["layer"], nn.Linear) == blocks


def test_scales_that_disagree(even: Path, tmp_path: Path) -> None:
    folder = by_the_package(even, tmp_path / "in", torch.float32)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{UP}.weight_scale": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=rf"{UP}: weight_scale: expected floating point \[2, 1\], got .* \[1\]"):
        models.load(Checkpoint(folder))


def with_a_cache(folder: Path) -> Path:
    """As llm-compressor leaves a directory whose keys and values are FP8 too: a scale for each, beside attention."""
    tensors, file = load_file(folder / "model.safetensors"), folder / "config.json"
    for layer in range(2):
        for part in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{part}"] = torch.rand(1).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads(file.read_text())
    config["quantization_config"] |= {"kv_cache_scheme": CACHE}
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("tool", ["pack-quantized", "int-quantized", "float-quantized", foreign.FP8_BLOCKS])
def test_a_cache_that_is_quantised(seed: int, tmp_path: Path, tool: str) -> None:
    """The weights are read, one warning is given, and what is converted has no scales of a cache."""
    foreign.write(tmp_path / "plain", foreign.llama(), tool, shards=1)
    shutil.copytree(tmp_path / "plain", tmp_path / "in")
    with_a_cache(tmp_path / "in")
    expected = logits(models.load(Checkpoint(tmp_path / "plain"))[0])
    with pytest.warns(UserWarning, match="the key-value cache stays in the model's type") as warned:
        found, _ = models.load(Checkpoint(tmp_path / "in"))
    assert len(warned) == 1 and torch.equal(logits(found), expected)
    with pytest.warns(UserWarning, match="key-value cache") as warned:
        convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "epiloq"))
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits(models.load(Checkpoint(tmp_path / "out"))[0]), expected)


def test_cache_scales_without_configuration(seed: int, tmp_path: Path) -> None:
    foreign.write(tmp_path / "plain", foreign.llama(), "pack-quantized", shards=1)
    shutil.copytree(tmp_path / "plain", tmp_path / "in")
    folder = with_a_cache(tmp_path / "in")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"kv_cache_scheme": None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="the key-value cache stays in the model's type"):
        found, _ = models.load(Checkpoint(folder))
    assert torch.equal(logits(found), logits(models.load(Checkpoint(tmp_path / "plain"))[0]))
