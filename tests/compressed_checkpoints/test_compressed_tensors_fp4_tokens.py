"""``w4a8-mxfp4-fp8`` and ``w4a8-nvfp4-fp8`` in compressed-tensors: what the package validates, opens and computes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file
from torch import Tensor

import epiloq.integrations.transformers as integration
from command_line import WIDE, letters, run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.integrations.transformers import EpiloqConfig
from epiloq.nn import W4A8Fp4Linear
from opened_models import TOKENS, opened
from rounded_models import same, weights
from tiny_teacher import save, tiny_model

# Other tests want transformers as it is.
integration.unregister()

LAYER = "model.layers.0.mlp.down_proj"
FORMS = ("mxfp4", "nvfp4")
TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def scheme_of(form: str) -> str:
    return f"w4a8-{form}-fp8"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16, quantised to both schemes, by GPTQ and by rounding to nearest."""
    folder = tmp_path_factory.mktemp("w4a8 fp4")
    torch.manual_seed(0)
    save(folder / "model", tiny_model(**WIDE).bfloat16())
    (folder / "text").write_text(letters(1500))
    text = ("--calibration", folder / "text", "--windows", 8, "--length", 32)
    for form, options in (("mxfp4", ("--algorithm", "gptq", *text)), ("nvfp4", ("--algorithm", "rtn"))):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = run("quantize", folder / "model", "--scheme", scheme_of(form), "--output", folder / form, *options)
        assert result.exit_code == 0, result.output
        assert any("vLLM refuses NVFP4" in str(one.message) for one in seen) == (form == "nvfp4")
    return folder


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()  # type: ignore[no-any-return]


def described(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_package_validates_and_decodes_it(folders: Path, form: str) -> None:
    """Weights as its 16-bit preset has them, tokens as its preset for int4 does; its own classes accept both."""
    found = described(folders / form)
    (group,) = found["config_groups"].values()
    assert group["input_activations"] == TOKEN
    assert preset_name_to_scheme("W4AFP8", ["Linear"]).input_activations.model_dump().items() >= TOKEN.items()
    parsed = QuantizationConfig.model_validate({name: value for name, value in found.items() if name != "dequantize"})
    (scheme,) = parsed.config_groups.values()
    expected = preset_name_to_scheme(f"{form.upper()}A16", ["Linear"]).weights.model_dump()
    names = ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "scale_dtype")
    assert all(scheme.weights.model_dump()[name] == expected[name] for name in names)
    stored = load_file(folders / form / "model.safetensors")
    tensors = {name.removeprefix(f"{LAYER}."): t for name, t in stored.items() if name.startswith(LAYER)}
    values = {"weight_packed", "weight_scale"}
    assert tensors.keys() == (values if form == "mxfp4" else values | {"weight_global_scale"})
    theirs = BaseCompressor.get_value_from_registry(found["format"]).decompress(tensors, scheme)["weight"]
    # The package multiplies in bfloat16.
    torch.testing.assert_close(theirs.float(), weights(folders / form)[f"{LAYER}.weight"], rtol=2**-7, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_stock_transformers_opens_it(folders: Path, form: str) -> None:
    folder = folders / form
    # The package restores weights in bfloat16, whatever type is asked for.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found, expected = logits(theirs), logits(models.load(Checkpoint(folder))[0])
    assert float((found - expected).norm() / expected.norm()) < 0.08


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("epiloq_in_transformers")
def test_opened_saved_and_converted(folders: Path, tmp_path: Path, form: str) -> None:
    model, _ = models.load(Checkpoint(folders / form))
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, W4A8Fp4Linear) and (layer.format, layer.activation) == (form, "fp8")
    theirs = opened(folders / form)
    assert torch.equal(logits(theirs), logits(model))
    theirs.save_pretrained(tmp_path / "saved")
    assert same(weights(tmp_path / "saved"), weights(folders / form))
    for source, target, layout in (("in", "epiloq", "epiloq"), ("epiloq", "back", "compressed-tensors")):
        where = folders / form if source == "in" else tmp_path / source
        result = run("convert", where, tmp_path / target, "--format", layout)
        assert result.exit_code == 0, result.output
    assert torch.equal(logits(opened(tmp_path / "epiloq")), logits(model))
    before, after = (load_file(where / "model.safetensors") for where in (folders / form, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    assert described(tmp_path / "back") == described(folders / form)
    for where in (folders / form, tmp_path / "epiloq"):
        result = run("inspect", where, "--json", tmp_path / "facts.json")
        assert result.exit_code == 0, result.output
        facts = json.loads((tmp_path / "facts.json").read_text())
        assert facts["scheme"] == scheme_of(form)
        assert {(row["weights"], row["activations"]) for row in facts["kinds"]} == {(form, "fp8")}
        assert any("FP4 with 8-bit activations" in note for note in facts["notes"])


@pytest.mark.parametrize("layout", ["modelopt", "deepseek-fp8", "gptq"])
@pytest.mark.parametrize("form", FORMS)
def test_other_formats_refuse_it_by_name(folders: Path, tmp_path: Path, form: str, layout: str) -> None:
    """ModelOpt has FP8 activations with NVFP4, but of one scale in the files; DeepSeek's, in groups of 128."""
    result = run("convert", folders / form, tmp_path / "out", "--format", layout)
    shown = " ".join(result.output.split())
    assert result.exit_code == 2 and "cannot represent W4A8Fp4Linear(" in shown, shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("epiloq_in_transformers")
def test_quantised_as_it_is_loaded(folders: Path, form: str) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folders / "model", quantization_config=EpiloqConfig(scheme=scheme_of(form)))
    assert isinstance(model.get_submodule(LAYER), W4A8Fp4Linear)
    expected = logits(load(folders / "model"))
    assert float((logits(model) - expected).norm() / expected.norm()) < 0.4


def changed(folder: Path, target: Path, activations: dict[str, Any]) -> Path:
    """A copy with other activations."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = activations
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_int8_tokens(folders: Path, tmp_path: Path) -> None:
    folder = changed(folders / "mxfp4", tmp_path / "model", TOKEN | {"type": "int"})
    model, _ = models.load(Checkpoint(folder))
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, W4A8Fp4Linear) and layer.activation == "int8"
    result = run("convert", folder, tmp_path / "out", "--format", "epiloq")
    assert result.exit_code == 0, result.output
    again, _ = models.load(Checkpoint(tmp_path / "out"))
    assert torch.equal(logits(again), logits(model))


def test_activations_of_other_bits_are_refused(folders: Path, tmp_path: Path) -> None:
    folder = changed(folders / "mxfp4", tmp_path / "model", TOKEN | {"num_bits": 6})
    result = run("inspect", folder)
    shown = " ".join(result.output.split())
    assert result.exit_code == 2 and "input_activations: num_bits: expected 8, got 6" in shown
