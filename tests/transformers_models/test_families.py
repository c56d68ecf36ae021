"""Models of every structure: quantised in memory, saved, opened again; and by ``epiloq quantize``."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="models of transformers need the extra hf")

import transformers

import epiloq
import epiloq.integrations.transformers as integration
from command_line import letters, run
from epiloq.formats import epiloq_modules
from epiloq.formats.io.model import from_directory
from epiloq.integrations.transformers import EpiloqConfig
from epiloq.schemes import SCHEMES, available
from more_families import MORE, answer, inputs
from tiny_teacher import save

# Other tests want transformers as it is.
integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")

SCHEMES_OF_ALL = [name for name in available() if not SCHEMES[name].static]
USUAL = ("w4a16-g32", "fp8-block")
CASES = [
    pytest.param(family, scheme, marks=() if scheme in USUAL else pytest.mark.slow)
    for family in MORE
    for scheme in SCHEMES_OF_ALL
]
# Layers that stay in floating point beside the output head, by the ends of their names.
LEFT = {
    "t5": {".wo", "lm_head"},
    "mamba": {".dt_proj", "lm_head"},
    "siglip": {".out_proj"},
    "llama4": {".router", "lm_head"},
    "bert": {"cls.predictions.decoder"},
    "modernbert": {"decoder"},
    "deberta": {".in_proj", "decoder"},
    "rwkv": {"attention.output", "feed_forward.value", "head"},
}
LARGEST_ERROR = {"rwkv": 0.15, "siglip": 0.15, "t5": 0.15, "gemma3n": 0.15}
"""By which quantised activations may change logits, beside dequantised weights: of random models of two layers."""


def quantised(model: Any, scheme: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return epiloq.quantize_(model, scheme)


def dequantised_(model: Any) -> Any:
    """Replace quantised layers by linear ones with the values that they represent."""
    for name in epiloq_modules.layers_of(model):
        module = model.get_submodule(name)
        kind = epiloq_modules.KINDS[type(module).__name__]
        weight = kind.weight(module, {option: value(module) for option, value in kind.options.items()})
        linear = nn.Linear(module.in_features, module.out_features, module.bias is not None)
        linear.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
        linear.bias = module.bias if module.bias is None else nn.Parameter(module.bias.detach(), requires_grad=False)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, linear)
    return model


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_in_memory_and_from_a_directory(seed: int, tmp_path: Path, family: str, scheme: str) -> None:
    model = quantised(MORE[family]().eval(), scheme)
    given = inputs(family)
    found = answer(model, given)
    left = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert all(name.endswith(tuple(LEFT.get(family, {"lm_head"}))) for name in left), left
    # The old-fashioned save_pretrained of transformers would do as well; this one checks its input.
    epiloq_modules.save(model, tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model")
    assert torch.equal(answer(again, given), found)
    assert torch.equal(answer(from_directory(tmp_path / "model"), given), found)
    plain = answer(dequantised_(again), given)
    bound = 1e-4 if "a16" in scheme else LARGEST_ERROR.get(family, 0.05)
    assert float((found - plain).norm() / plain.norm()) < bound


@pytest.mark.parametrize("family", ["gpt2", "falcon", "bigcode", "t5", "mamba", "gemma3n"])
def test_after_loading(seed: int, tmp_path: Path, family: str) -> None:
    model, given = MORE[family]().eval(), inputs(family)
    model.save_pretrained(tmp_path / "float")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = type(model).from_pretrained(tmp_path / "float", quantization_config=EpiloqConfig("w8a8-int8"))
    assert torch.equal(answer(found, given), answer(quantised(model, "w8a8-int8"), given))
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(answer(type(model).from_pretrained(tmp_path / "again"), given), answer(found, given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_that_a_model_keeps_in_float32(seed: int, tmp_path: Path, dtype: torch.dtype) -> None:
    """T5's second feed-forward layer overflows in float16."""
    model = quantised(MORE["t5"]().eval(), "w8a16")
    epiloq_modules.save(model, tmp_path / "model")
    found = type(model).from_pretrained(tmp_path / "model", dtype=dtype)
    kept = torch.float32 if dtype == torch.float16 else dtype
    assert {p.dtype for name, p in found.named_parameters() if ".wo." in name} == {kept}
    floats = {name: p.dtype for name, p in found.named_parameters() if p.is_floating_point()}
    assert {kind for name, kind in floats.items() if ".wo." not in name and "_scale" not in name} == {dtype}
    given = inputs("t5")
    assert float((answer(found, given) - answer(model, given)).norm() / answer(model, given).norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_command_keeps_them_in_float32_too(seed: int, tmp_path: Path, dtype: torch.dtype) -> None:
    result = job(tmp_path, "t5", "--algorithm", "rtn", scheme="w8a16", dtype=dtype)
    assert result.exit_code == 0, result.output
    theirs, ours = type(MORE["t5"]()).from_pretrained(tmp_path / "out"), from_directory(tmp_path / "out")
    assert {n: p.dtype for n, p in ours.named_parameters()} == {n: p.dtype for n, p in theirs.named_parameters()}
    given = inputs("t5")
    assert torch.equal(answer(theirs, given), answer(ours, given))


def job(folder: Path, family: str, *options: object, scheme: str = "w4a16-g32", dtype: Any = None) -> Any:
    """``epiloq quantize`` of a family whose vocabulary a tokenizer of bytes fills."""
    model = MORE[family]().to(dtype).eval()
    model.resize_token_embeddings(256)
    save(folder / "model", model)
    (folder / "text.txt").write_text(letters(600))
    short = ("--windows", 16, "--length", 16, "--calibration", folder / "text.txt", "--json", folder / "r.json")
    return run("quantize", folder / "model", "--output", folder / "out", "--scheme", scheme, *short, *options)


COMMANDS = [
    ("gpt2", "gptq", "gptq"),
    ("gpt2", "awq+gptq", "epiloq"),
    ("falcon", "gptq", "compressed-tensors"),
    ("bigcode", "awq", "compressed-tensors"),
    ("mamba", "gptq", "compressed-tensors"),
    ("llama4", "gptq", "compressed-tensors"),
    ("t5", "rtn", "compressed-tensors"),
]


@pytest.mark.parametrize(("family", "algorithm", "layout"), COMMANDS)
def test_the_command(seed: int, tmp_path: Path, family: str, algorithm: str, layout: str) -> None:
    options = ("--algorithm", algorithm, *(("--format", layout) if layout == "epiloq" else ()))
    result = job(tmp_path, family, *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["layout"] == layout
    kind, given = type(MORE[family]()), inputs(family)
    source = kind.from_pretrained(tmp_path / "model")
    found = kind.from_pretrained(tmp_path / "out")
    assert torch.equal(answer(from_directory(tmp_path / "out"), given), answer(found, given))
    exact = answer(source, given)
    assert 0 < float((answer(found, given) - exact).norm() / exact.norm()) < 0.25
    ends = tuple(LEFT.get(family, set()) - {"lm_head"})
    assert all(name.endswith(ends) for name in report["float_layers"]) and bool(ends) == bool(report["float_layers"])
    for name, reason in report["float_layers"].items():
        assert reason in result.output and torch.equal(
            found.get_parameter(f"{name}.weight"), source.get_parameter(f"{name}.weight")
        )


def test_transformers_opens_experts_that_were_stacked(seed: int, tmp_path: Path) -> None:
    """Without epiloq: it has a matrix an expert in this format alone."""
    pytest.importorskip("compressed_tensors")
    assert job(tmp_path, "llama4", "--algorithm", "rtn", scheme="w8a16").exit_code == 0
    given, kind = inputs("llama4"), type(MORE["llama4"]())
    found = kind.from_pretrained(tmp_path / "out")
    integration.unregister()
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = kind.from_pretrained(tmp_path / "out", quantization_config=config)
    assert torch.allclose(answer(theirs, given), answer(found, given), rtol=1e-4, atol=1e-4)
    experts = [name for name in epiloq_modules.layers_of(found) if ".experts.3." in name]
    assert len(experts) == 3
    integration.register()
    for layout in ("epiloq", "gptq"):
        assert run("convert", tmp_path / "out", tmp_path / layout, "--format", layout).exit_code == 0
        assert torch.equal(answer(kind.from_pretrained(tmp_path / layout), given), answer(found, given))
        assert torch.equal(answer(from_directory(tmp_path / layout), given), answer(found, given))


def test_a_transposed_layer_that_is_ignored_is_written_as_it_was(seed: int, tmp_path: Path) -> None:
    result = job(tmp_path, "gpt2", "--algorithm", "rtn", "--ignore", "*.c_proj", "--format", "gptq")
    assert result.exit_code == 0, result.output
    kind = type(MORE["gpt2"]())
    source, found = kind.from_pretrained(tmp_path / "model"), kind.from_pretrained(tmp_path / "out")
    name = "transformer.h.1.mlp.c_proj.weight"
    assert torch.equal(found.get_parameter(name), source.get_parameter(name))
    dynamic = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert "-:^transformer\\.h\\.1\\.mlp\\.c_proj$" in dynamic
    given = inputs("gpt2")
    assert torch.equal(answer(from_directory(tmp_path / "out"), given), answer(found, given))


def test_formats_refuse_transposed_layers(seed: int, tmp_path: Path) -> None:
    result = job(tmp_path, "gpt2", "--algorithm", "rtn", "--format", "compressed-tensors")
    assert result.exit_code == 2 and "compressed-tensors: cannot represent a Conv1D" in result.output
    assert "type --format gptq or --format epiloq instead" in result.output
    assert job(tmp_path, "gpt2", "--algorithm", "rtn", scheme="w8a8-int8").exit_code == 0
    other = run("convert", tmp_path / "out", tmp_path / "ct", "--format", "compressed-tensors")
    assert other.exit_code == 2 and "cannot represent a Conv1D" in other.output


def test_an_encoder_and_a_decoder_cannot_be_calibrated(seed: int, tmp_path: Path) -> None:
    result = job(tmp_path, "t5", "--algorithm", "gptq")
    assert (
        result.exit_code == 2 and "is an encoder and a decoder" in result.output and "--algorithm rtn" in result.output
    )
    assert not (tmp_path / "out").exists()
