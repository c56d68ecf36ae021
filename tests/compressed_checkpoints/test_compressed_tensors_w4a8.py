"""``w4a8-fp8`` and ``w4a8-int8`` in compressed-tensors: what vLLM's readers expect, and stock transformers opens."""

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

from safetensors.torch import load_file

import epiloq.integrations.transformers as integration
from command_line import WIDE, letters, run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.integrations.transformers import EpiloqConfig
from epiloq.nn import W4A8Linear
from opened_models import TOKENS, opened
from rounded_models import same, weights
from tiny_teacher import save, tiny_model

# Other tests want transformers as it is.
integration.unregister()

LAYER = "model.layers.0.mlp.down_proj"
TYPES = {"w4a8-fp8": ("float", "pack-quantized"), "w4a8-int8": ("int", "int-quantized")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16, quantised to both schemes."""
    folder = tmp_path_factory.mktemp("w4a8")
    torch.manual_seed(0)
    save(folder / "model", tiny_model(**WIDE).bfloat16())
    (folder / "text").write_text(letters(1500))
    for scheme, algorithm in (("w4a8-fp8", "gptq"), ("w4a8-int8", "awq")):
        text = ("--calibration", folder / "text", "--windows", 8, "--length", 32, "--algorithm", algorithm)
        result = run("quantize", folder / "model", "--scheme", scheme, "--output", folder / scheme, *text)
        assert result.exit_code == 0, result.output
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", TYPES)
def test_layout_expected_by_vllm(folders: Path, scheme: str) -> None:
    """CompressedTensorsW4A8Fp8 takes int4 in groups of 128, symmetric, packed in words, with scales of the model's
    type; CompressedTensorsW4A8Int a byte for each; tokens are quantised at run time, symmetric."""
    kind, layout = TYPES[scheme]
    message = json.loads((folders / scheme / "config.json").read_text())["quantization_config"]
    (group,) = message["config_groups"].values()
    assert message["format"] == group["format"] == layout
    weights_of, inputs = group["weights"], group["input_activations"]
    number = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
    assert {key: weights_of[key] for key in number} == number
    tokens = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    assert {key: inputs[key] for key in tokens} == tokens
    stored = load_file(folders / scheme / "model.safetensors")
    found = {name.removeprefix(f"{LAYER}."): t for name, t in stored.items() if name.startswith(LAYER)}
    assert found["weight_scale"].dtype == torch.bfloat16 and found["weight_scale"].shape == (128, 2)
    if scheme == "w4a8-fp8":
        assert found.keys() == {"weight_packed", "weight_scale", "weight_shape"}
        assert found["weight_packed"].dtype == torch.int32 and found["weight_packed"].shape == (128, 256 // 8)
        assert found["weight_shape"].tolist() == [128, 256]
    else:
        assert found.keys() == {"weight", "weight_scale"}
        assert found["weight"].dtype == torch.int8 and found["weight"].shape == (128, 256)
        assert int(found["weight"].min()) >= -8 and int(found["weight"].max()) <= 7


@pytest.mark.parametrize("scheme", TYPES)
def test_stock_transformers_opens_it(folders: Path, scheme: str) -> None:
    folder = folders / scheme
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found, expected = logits(theirs), logits(models.load(Checkpoint(folder))[0].float())
    assert float((found - expected).norm() / expected.norm()) < 0.08
    for name, values in weights(folder).items():
        torch.testing.assert_close(theirs.get_parameter(name), values.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("scheme", TYPES)
@pytest.mark.usefixtures("epiloq_in_transformers")
def test_opened_saved_and_converted(folders: Path, tmp_path: Path, scheme: str) -> None:
    model, _ = models.load(Checkpoint(folders / scheme))
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, W4A8Linear) and layer.activation == scheme.removeprefix("w4a8-")
    theirs = opened(folders / scheme)
    assert torch.equal(logits(theirs), logits(model))
    theirs.save_pretrained(tmp_path / "saved")
    assert same(weights(tmp_path / "saved"), weights(folders / scheme))
    for source, target, layout in (("in", "epiloq", "epiloq"), ("epiloq", "back", "compressed-tensors")):
        where = folders / scheme if source == "in" else tmp_path / source
        result = run("convert", where, tmp_path / target, "--format", layout)
        assert result.exit_code == 0, result.output
    before, after = (load_file(where / "model.safetensors") for where in (folders / scheme, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    result = run("inspect", tmp_path / "epiloq", "--json", tmp_path / "facts.json")
    assert result.exit_code == 0 and json.loads((tmp_path / "facts.json").read_text())["scheme"] == scheme
    result = run("convert", folders / scheme, tmp_path / "gptq", "--format", "gptq")
    assert result.exit_code == 2 and "quantised activations" in result.output


@pytest.mark.parametrize("scheme", TYPES)
@pytest.mark.usefixtures("epiloq_in_transformers")
def test_quantised_as_it_is_loaded(folders: Path, scheme: str) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folders / "model", quantization_config=EpiloqConfig(scheme=scheme))
    assert isinstance(model.get_submodule(LAYER), W4A8Linear)
    expected = logits(load(folders / "model"))
    assert float((logits(model) - expected).norm() / expected.norm()) < 0.4
