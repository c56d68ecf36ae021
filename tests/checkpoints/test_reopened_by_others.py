"""What epiloq writes, opened by stock transformers with compressed-tensors: every name, and weights that are tied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import Tensor

import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
import foreign_variants as variants
from command_line import ROUND, letters, run
from epiloq.formats import convert, deepseek_fp8, epiloq_modules
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layers import Layers
from epiloq.models.subclasses import is_plain
from epiloq.schemes import quantize_
from opened_models import TOKENS
from rounded_models import SAYABLE, same, unchanged, weights, written
from tiny_teacher import save, tiny_model

# Other tests want transformers as it is.
integration.unregister()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def stock(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize("kind", SAYABLE)
def test_every_grid(tmp_path: Path, kind: str) -> None:
    """With zero points too, which is what ``w4a16-*`` makes by default."""
    teacher = save(tmp_path / "teacher", tiny_model(**ROUND))
    folder = written(teacher, tmp_path / "out", "compressed-tensors", SAYABLE[kind][0], unchanged)
    theirs = stock(folder)
    found, expected = logits(theirs), logits(models.load(Checkpoint(folder))[0])
    # Beside 8-bit activations the package restores the weights in floating point before it multiplies.
    assert float((found - expected).norm() / expected.norm()) < (
        1e-5 if "a8" not in kind else 0.08 if "fp8" in kind else 0.03
    )
    for name, values in weights(folder).items():
        torch.testing.assert_close(theirs.get_parameter(name), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32"])
def test_names_of_files_and_of_modules(seed: int, tmp_path: Path, scheme: str) -> None:
    """GPT-NeoX calls its head embed_out in files, and transformers lm_head: both are among the layers left alone."""
    save(tmp_path / "model", foreign.gpt_neox())
    (tmp_path / "text").write_text(letters(1500))
    text = ("--calibration", tmp_path / "text", "--windows", 8, "--length", 32)
    result = run("quantize", tmp_path / "model", "--scheme", scheme, "--output", tmp_path / "out", *text)
    assert result.exit_code == 0, result.output
    message = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {"embed_out", "lm_head"} <= set(message["ignore"])
    found, expected = logits(stock(tmp_path / "out")), logits(models.load(Checkpoint(tmp_path / "out"))[0])
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def untied(folder: Path, order: str) -> Tensor:
    """Another output head than the embedding in the files, in either order, though config.json ties them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("lm_head.weight", None)
    embedding = tensors["model.embed_tokens.weight"]
    head = torch.randn(embedding.shape, dtype=torch.float32).to(embedding.dtype)
    # Names decide in which order tensors are read, and shards decide before them.
    first, second = ("lm_head.weight", head), ("model.embed_tokens.weight", embedding)
    other, rest = (first, second) if order == "head first" else (second, first)
    tensors.pop("model.embed_tokens.weight")
    shards = {"a.safetensors": dict([other]), "b.safetensors": dict([rest, *tensors.items()])}
    file.unlink()
    for name, held in shards.items():
        save_file(held, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return head


@pytest.mark.parametrize("order", ["head first", "head last"])
@pytest.mark.parametrize("tool", ["pack-quantized", "fp8"])
def test_a_head_of_its_own_though_tied(seed: int, tmp_path: Path, tool: str, order: str) -> None:
    foreign.write(tmp_path / "in", foreign.llama(), tool, shards=1)
    head = untied(tmp_path / "in", order)
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert torch.equal(model.get_parameter("lm_head.weight"), head)
    assert not torch.equal(model.get_parameter("model.embed_tokens.weight"), head)
    if tool == "fp8":
        again = deepseek_fp8.load(tmp_path / "in")
        assert torch.equal(again.get_parameter("lm_head.weight"), head)
    else:
        restored = transformers.utils.quantization_config.CompressedTensorsConfig(dequantize=True)
        theirs = stock(tmp_path / "in", quantization_config=restored)
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            assert torch.equal(theirs.get_parameter(name), model.get_parameter(name))
    layers = Layers(Checkpoint(tmp_path / "in"))
    values = layers.dequantize("lm_head")
    assert values is not None and torch.equal(values, head)
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "out", "epiloq"))
    assert same(weights(tmp_path / "out"), weights(tmp_path / "in"))
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "out"))[0]), logits(model))


def test_equal_weights_stay_tied(seed: int, tmp_path: Path) -> None:
    foreign.write(tmp_path / "in", foreign.llama(), "pack-quantized", shards=1)
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_stacked_experts_stay_as_they_are(seed: int, tmp_path: Path) -> None:
    """Llama-4 keeps its experts in stacks of another structure, which files hold in floating point."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Llama4TextConfig(
        vocab_size=256, intermediate_size=96, intermediate_size_mlp=96, head_dim=16, num_local_experts=4, **sizes
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    save(tmp_path / "model", model)
    epiloq_modules.save(quantize_(model, "w4a16-g32"), tmp_path / "epiloq")
    convert.perform(convert.prepare(tmp_path / "epiloq", tmp_path / "out", "compressed-tensors"))
    expected = logits(models.load(Checkpoint(tmp_path / "epiloq"))[0])
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "out"))[0]), expected)
    found = logits(stock(tmp_path / "out"))
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_models_opened_by_others_are_not_quantised_again(tmp_path: Path) -> None:
    """Saved, it would have their description and our tensors."""
    teacher = save(tmp_path / "teacher", tiny_model(**ROUND))
    model = stock(written(teacher, tmp_path / "out", "compressed-tensors", SAYABLE["int8 channel"][0], unchanged))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for ends in ({"head": "w8a16"}, {}):
        with pytest.raises(ValueError, match=r"model: expected a float model, got .*opened by compressed-tensors: "):
            quantize_(model, "w8a16", **ends)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_dequantised_models_can_be_quantised(seed: int, tmp_path: Path) -> None:
    foreign.write(tmp_path / "in", foreign.llama(), "pack-quantized", shards=1)
    config = transformers.utils.quantization_config.CompressedTensorsConfig(dequantize=True)
    model = quantize_(stock(tmp_path / "in", quantization_config=config), "w8a16")
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "out"))[0]), logits(model))


@pytest.mark.parametrize("status", ["decompressed", "frozen"])
@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "dynamic": True, "strategy": "token"}], ids=str)
def test_a_forward_that_dequantising_leaves_behind(activations: Any, status: str, seed: int) -> None:
    """As of transformers 5.17: plain if it only rounds a weight that is on the grid already."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    layer: Any = torch.nn.Linear(64, 32)
    weights = {"num_bits": 4, "group_size": 32, "strategy": "group"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    layer.quantization_scheme = quantization.QuantizationScheme(**scheme)
    layer.quantization_status = quantization.QuantizationStatus(status)
    assert is_plain(layer)
    forward.set_forward_quantized(layer)
    assert is_plain(layer) == (activations is None and status == "decompressed")


@pytest.mark.parametrize("tool", ["int8 weights alone", "int8 per tensor", "fp8 weights alone"])
def test_a_classifier_of_a_language_models_files(
    seed: int, tmp_path: Path, epiloq_in_transformers: None, tool: str
) -> None:
    """The description that epiloq saves leaves the new head in floating point: others would look for its scales."""
    foreign.write_as(tmp_path / "in", foreign.llama(), *variants.VARIANTS[tool])
    classes = transformers.AutoModelForTokenClassification
    ours = classes.from_pretrained(tmp_path / "in", num_labels=3).eval()
    expected = logits(ours)
    ours.save_pretrained(tmp_path / "out")
    description = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert description["ignore"] == ["re:.*lm_head", "score"]
    integration.unregister()
    found = logits(classes.from_pretrained(tmp_path / "out", dtype=torch.float32).eval())
    # Beside 8-bit activations the package restores the weights in floating point before it multiplies.
    assert float((found - expected).norm() / expected.norm()) < (0.1 if tool == "int8 per tensor" else 1e-5)
