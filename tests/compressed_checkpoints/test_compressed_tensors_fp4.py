"""``w4a16-mxfp4`` and ``w4a16-nvfp4`` in compressed-tensors: what the package itself reads, and what it writes."""

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

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torch import Tensor

import epiloq
import epiloq.integrations.transformers as integration
from command_line import WIDE, run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.nn import Fp4Linear
from opened_models import TOKENS, opened
from rounded_models import same, weights
from tiny_teacher import save, tiny_model

# Other tests want transformers as it is.
integration.unregister()

LAYER = "model.layers.0.mlp.down_proj"
LAYOUTS = {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
PRESETS = {"mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16, quantised to both formats."""
    folder = tmp_path_factory.mktemp("fp4")
    torch.manual_seed(0)
    save(folder / "model", tiny_model(**WIDE).bfloat16())
    for form in LAYOUTS:
        result = run(
            "quantize", folder / "model", "--scheme", f"w4a16-{form}", "--algorithm", "rtn", "--output", folder / form
        )
        assert result.exit_code == 0, result.output
    return folder


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()  # type: ignore[no-any-return]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    stored = load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{LAYER}."): t for name, t in stored.items() if name.startswith(LAYER)}


@pytest.mark.parametrize("form", LAYOUTS)
def test_the_package_reads_it(folders: Path, form: str) -> None:
    """Its own preset describes the layers, and its compressor gives the weight that ours stands for."""
    message = json.loads((folders / form / "config.json").read_text())["quantization_config"]
    (group,) = message["config_groups"].values()
    scheme = preset_name_to_scheme(PRESETS[form], ["Linear"])
    expected = json.loads(scheme.model_dump_json(exclude_none=True))["weights"]
    assert message["format"] == group["format"] == LAYOUTS[form] and group["input_activations"] is None
    for key in ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "scale_dtype"):
        assert group["weights"][key] == expected[key], key
    found = tensors_of(folders / form)
    k = 256
    assert found["weight_packed"].dtype == torch.uint8 and found["weight_packed"].shape == (128, k // 2)
    kind, block = (torch.uint8, 32) if form == "mxfp4" else (torch.float8_e4m3fn, 16)
    assert found["weight_scale"].dtype == kind and found["weight_scale"].shape == (128, k // block)
    assert ("weight_global_scale" in found) == (form == "nvfp4")
    theirs = BaseCompressor.get_value_from_registry(LAYOUTS[form]).decompress(found, scheme)["weight"]
    ours = weights(folders / form)[f"{LAYER}.weight"]
    # The package multiplies in bfloat16.
    torch.testing.assert_close(theirs.float(), ours, rtol=2**-7, atol=0)


@pytest.mark.parametrize("form", LAYOUTS)
def test_codes_are_those_of_the_package(folders: Path, form: str) -> None:
    """Of the same float weight and scales; NVFP4's scales are the package's own, too."""
    weight = load_file(folders / "model" / "model.safetensors")[f"{LAYER}.weight"].float()
    found = tensors_of(folders / form)
    scheme = preset_name_to_scheme(PRESETS[form], ["Linear"])
    scale = found["weight_scale"]
    state = {
        "weight": weight,
        "weight_scale": scale.float() if form == "nvfp4" else epiloq.weights.fp4.scale_values(scale),
    }
    if form == "nvfp4":
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        whole = generate_gparam(weight.min(), weight.max())
        assert torch.equal(whole.reshape(1), found["weight_global_scale"])
        blocks = weight.view(128, -1, 16)
        theirs, _ = calculate_qparams(blocks.amin(2), blocks.amax(2), scheme.weights, whole)
        # They divide by 6 and multiply by the global scale; next to a tie that gives the neighbour.
        assert (theirs.to(torch.float8_e4m3fn).view(torch.uint8) != scale.view(torch.uint8)).float().mean() < 0.01
        state["weight_global_scale"] = found["weight_global_scale"]
    packed = BaseCompressor.get_value_from_registry(LAYOUTS[form]).compress(state, scheme)["weight_packed"]
    differs = packed != found["weight_packed"]
    # -0 is 0 there or here.
    ours, theirs = (epiloq.weights.fp4.code_values(codes, 256) for codes in (found["weight_packed"], packed))
    assert (ours != theirs).float().mean() < 0.001, differs.float().mean()


@pytest.mark.parametrize("form", LAYOUTS)
def test_stock_transformers_opens_it(folders: Path, form: str) -> None:
    folder = folders / form
    # The package restores weights in bfloat16, whatever type is asked for.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found, expected = logits(theirs), logits(models.load(Checkpoint(folder))[0])
    assert float((found - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.usefixtures("epiloq_in_transformers")
def test_opened_saved_and_converted(folders: Path, tmp_path: Path, form: str) -> None:
    model, _ = models.load(Checkpoint(folders / form))
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, Fp4Linear) and layer.format == form
    theirs = opened(folders / form)
    assert torch.equal(logits(theirs), logits(model))
    theirs.save_pretrained(tmp_path / "saved")
    assert same(weights(tmp_path / "saved"), weights(folders / form))
    for source, target, layout in (("in", "epiloq", "epiloq"), ("epiloq", "back", "compressed-tensors")):
        where = folders / form if source == "in" else tmp_path / source
        result = run("convert", where, tmp_path / target, "--format", layout)
        assert result.exit_code == 0, result.output
    before, after = (load_file(where / "model.safetensors") for where in (folders / form, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    result = run("inspect", tmp_path / "epiloq", "--json", tmp_path / "facts.json")
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert any("on CUDA for up to 64 tokens" in note for note in facts["notes"])
    assert facts["scheme"] == f"w4a16-{form}" and {row["weights"] for row in facts["kinds"]} == {form}
    result = run("convert", folders / form, tmp_path / "gptq", "--format", "gptq")
    assert result.exit_code == 2 and "cannot represent Fp4Linear" in result.output


def changed(folder: Path, target: Path, activations: dict[str, Any] | None, more: dict[str, Tensor]) -> Path:
    """A copy whose layers are described with quantised activations, and have more tensors."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = activations
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        tensors |= {name.replace("weight_packed", part): tensor.clone() for part, tensor in more.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("preset", ["NVFP4", "MXFP4"])
def test_fp4_activations_stay_in_floating_point(folders: Path, tmp_path: Path, preset: str) -> None:
    """The weights are used as they are; a warning says that activations stay in floating point."""
    form = preset.lower()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    activations = json.loads(scheme.model_dump_json(exclude_none=True))["input_activations"]
    more = {"input_global_scale": torch.tensor([300.0])} if form == "nvfp4" else {}
    folder = changed(folders / form, tmp_path / "w4a4", activations, more)
    with pytest.warns(UserWarning, match="FP4 weights are used as they are, but activations stay in floating point"):
        model, _ = models.load(Checkpoint(folder))
    assert torch.equal(logits(model), logits(models.load(Checkpoint(folders / form))[0]))


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("nvfp4", {"group_size": 32}, "expected symmetric FP4, tensor_group of 16 or group of 32"),
        ("nvfp4", {"symmetric": False}, "expected symmetric FP4"),
        ("mxfp4", {"strategy": "channel", "group_size": None}, "expected symmetric FP4"),
        ("mxfp4", {"dynamic": True}, "expected symmetric FP4"),
        ("mxfp4", {"group_size": 16}, "expected symmetric FP4"),
        ("nvfp4", {"num_bits": 8}, "weights: expected scales in the files (tensor, channel, group or block)"),
    ],
)
def test_other_descriptions_are_refused(
    folders: Path, tmp_path: Path, form: str, change: dict[str, Any], message: str
) -> None:
    folder = changed(folders / form, tmp_path / "model", None, {})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    result = run("inspect", folder)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_a_global_scale_of_zero_is_refused(folders: Path, tmp_path: Path) -> None:
    folder = changed(folders / "nvfp4", tmp_path / "model", None, {"weight_global_scale": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"weight_global_scale: expected a positive number, got 0\.0"):
        models.load(Checkpoint(folder))


def test_a_short_last_block_is_written_by_epiloq_alone(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    model = tiny_model(intermediate_size=72)
    save(tmp_path / "model", model)
    result = run(
        "quantize", tmp_path / "model", "--scheme", "w4a16-nvfp4", "--algorithm", "rtn", "--output", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    result = run("inspect", tmp_path / "out", "--json", tmp_path / "facts.json")
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["format"] == "epiloq", facts
    assert "in_features: expected a multiple of 16, got 72" in str(facts["formats"]["compressed-tensors"])
