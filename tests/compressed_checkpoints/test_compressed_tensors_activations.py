"""Activations of every granularity beside 4-bit weights in compressed-tensors.

They are computed as by the package, refused, or stay in floating point with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from command_line import run
from epiloq.formats.configs import compressed_tensors as config
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layer_reader import reader
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp4Linear, W4A8Fp4Linear
from rounded_models import weights
from tiny_teacher import save, tiny_model

LAYER = "model.layers.0.mlp.down_proj"
FORMS = ("mxfp4", "nvfp4")
TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
GROUP = TOKEN | {"strategy": "group", "group_size": 128}
STATIC = TOKEN | {"strategy": "tensor", "dynamic": False}
DYNAMIC = TOKEN | {"strategy": "tensor"}
INT8 = {"type": "int"}
# What weights are, as the package has them, and the module of FP4 weights without quantised activations.
FP4 = {form: preset_name_to_scheme(f"{form.upper()}A16", ["Linear"]).weights.model_dump(mode="json") for form in FORMS}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def described(weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> Any:
    """The description of a layer, whose configuration the package accepts too."""
    scheme = {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
    found = {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}}
    QuantizationConfig.model_validate(found | {"quantization_status": "compressed"})
    known = {key: value for key, value in weights.items() if value is not None}
    return config.parse(found | {"config_groups": {"group_0": scheme | {"weights": known}}})(["layer"], nn.Linear)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("activations", "kind"),
    [(TOKEN, "fp8"), (TOKEN | INT8, "int8"), (GROUP, "fp8-group"), (STATIC, "fp8-static")],
    ids=["token", "int8", "group", "static"],
)
def test_fp4_weights_with_activations_that_have_a_layer(form: str, activations: dict[str, Any], kind: str) -> None:
    found = reader(described(FP4[form], activations))
    assert found.module == ("W4A8Fp4Linear", {"format": form, "activation": kind})
    assert found.described is not None and found.described.loss is None
    assert ("input_scale" in (found.parts or ())) == (kind == "fp8-static")


def test_the_preset_of_groups_has_a_layer() -> None:
    """MXFP4XFP8, with every entry that the package writes."""
    preset = preset_name_to_scheme("MXFP4XFP8", ["Linear"])
    inputs = {
        key: value for key, value in preset.input_activations.model_dump(mode="json").items() if value is not None
    }
    found = reader(described(FP4["mxfp4"], inputs))
    assert found.module == ("W4A8Fp4Linear", {"format": "mxfp4", "activation": "fp8-group"})


FLOATING = {
    "FP8 per tensor, with scales computed at run time": DYNAMIC,
    "FP8 per group of 32, with scales computed at run time": GROUP | {"group_size": 32},
    "FP8 per token with zero points, with scales computed at run time": TOKEN | {"symmetric": False},
    "int8 per tensor, with scales in the files": STATIC | INT8,
    "int8 per group of 128, with scales computed at run time": GROUP | INT8,
    "FP4 per group, with scales computed at run time": GROUP | {"num_bits": 4, "group_size": 32},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", FLOATING)
def test_fp4_weights_with_others_say_what_stays_in_floating_point(form: str, what: str) -> None:
    found = reader(described(FP4[form], FLOATING[what]))
    assert found.module == ("Fp4Linear", {"format": form})
    assert found.described is not None
    expected = f"FP4 weights are used as they are, but activations stay in floating point, not in {what}"
    assert found.described.loss == expected


@pytest.mark.parametrize("group", [{}, {"strategy": "channel", "group_size": None}], ids=["groups", "channels"])
@pytest.mark.parametrize(("activations", "kind"), [(TOKEN, "fp8"), (TOKEN | INT8, "int8")], ids=["fp8", "int8"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_weights_with_tokens(
    group: dict[str, Any], activations: dict[str, Any], kind: str, symmetric: bool
) -> None:
    found = described(INT4 | group | {"symmetric": symmetric}, activations).quantization
    assert (found.activations, found.grid.bits, found.grid.group_size) == (kind, 4, -1 if group else 128)
    assert found.grid.symmetric == symmetric and found.w4a8


REFUSED = {
    "FP8 per group of 128, with scales computed at run time": GROUP,
    "FP8 per tensor, with scales in the files": STATIC,
    "FP8 per tensor, with scales computed at run time": DYNAMIC,
    "int8 per tensor, with scales in the files": STATIC | INT8,
    "int8 per group of 128, with scales computed at run time": GROUP | INT8,
    "int8 per token with zero points, with scales computed at run time": TOKEN | INT8 | {"symmetric": False},
}


@pytest.mark.parametrize("what", REFUSED)
def test_int4_groups_with_others_are_refused_in_one_sentence(what: str) -> None:
    with pytest.raises(FormatError) as error:
        described(INT4, REFUSED[what])
    assert str(error.value) == (
        "compressed-tensors: input_activations: expected symmetric int8 or FP8 per token, with scales computed at run "
        f"time, for int4 per group of 128, symmetric, got {what}"
    )


@pytest.mark.parametrize(("activations", "kind"), [(STATIC | INT8, "int8-static"), (TOKEN | INT8, "int8")])
def test_int4_channels_with_int8(activations: dict[str, Any], kind: str) -> None:
    """A scale per channel may be multiplied after the sum, so that int8's kernels serve."""
    channels = {key: value for key, value in INT4.items() if key != "group_size"} | {"strategy": "channel"}
    assert described(channels, activations).quantization.activations == kind


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float32 in both forms, with 16-bit activations."""
    folder = tmp_path_factory.mktemp("activations")
    torch.manual_seed(0)
    # 160 columns: a whole group and a part of one.
    save(folder / "model", tiny_model(hidden_size=160, intermediate_size=320, num_attention_heads=5, head_dim=32))
    for form in FORMS:
        given = ("--scheme", f"w4a16-{form}", "--algorithm", "rtn", "--output", folder / form)
        result = run("quantize", folder / "model", *given)
        assert result.exit_code == 0, result.output
    return folder


def with_activations(folder: Path, target: Path, activations: dict[str, Any], scale: Tensor | None = None) -> Path:
    """A copy with other activations, and their scale in every quantised layer."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    found = json.loads((target / "config.json").read_text())
    found["quantization_config"]["config_groups"]["group_0"]["input_activations"] = activations
    (target / "config.json").write_text(json.dumps(found))
    if scale is not None:
        tensors = load_file(target / "model.safetensors")
        layers = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
        tensors |= {f"{layer}.input_scale": scale.clone() for layer in layers}
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def check_as_the_package(folder: Path, activations: dict[str, Any], scale: Tensor | None) -> None:
    """Each layer multiplies what the package's quantiser restores by what its files stand for, in float64."""
    model, _ = models.load(Checkpoint(folder))
    arguments, dense = QuantizationArgs.model_validate(activations), weights(folder)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Fp4Linear)}
    assert len(layers) >= 7 and all(type(layer) is W4A8Fp4Linear for layer in layers.values())
    for name, layer in layers.items():
        # Whole groups, as the package's quantiser of groups wants them; magnitudes from 2^-4 to 2^4.
        columns = layer.in_features // 128 * 128
        x = torch.zeros(5, layer.in_features)
        x[:, :columns] = torch.randn(5, columns) * torch.rand(5, 1).mul(8).sub(4).exp2()
        values, found = x[:, :columns], scale
        if found is None:
            found, _ = compute_dynamic_scales_and_zp(values, arguments, layer)
        restored = fake_quantize(values, found.float(), None, arguments)
        weight = dense[f"{name}.weight"].double()[:, :columns]
        exact, size = restored.double() @ weight.t(), restored.double().abs() @ weight.abs().t()
        bound = 2.0**-23 * (columns**0.5 + 2) * size + 2.0**-23 * exact.abs()
        assert ((layer(x).double() - exact).abs() <= bound).all(), name


@pytest.mark.parametrize("form", FORMS)
def test_groups_are_computed_as_by_the_package(seed: int, folders: Path, tmp_path: Path, form: str) -> None:
    check_as_the_package(with_activations(folders / form, tmp_path / "groups", GROUP), GROUP, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_static_scales_are_computed_as_by_the_package(
    seed: int, folders: Path, tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    """Larger magnitudes than 448 times the scale saturate."""
    scale = torch.tensor([0.0123], dtype=dtype)
    check_as_the_package(with_activations(folders / form, tmp_path / "static", STATIC, scale), STATIC, scale)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["groups", "static"])
def test_converted_inspected_and_saved(folders: Path, tmp_path: Path, form: str, kind: str) -> None:
    activations, scale = (GROUP, None) if kind == "groups" else (STATIC, torch.tensor([0.02]))
    folder = with_activations(folders / form, tmp_path / "in", activations, scale)
    for source, target, layout in (("in", "epiloq", "epiloq"), ("epiloq", "back", "compressed-tensors")):
        result = run("convert", tmp_path / source, tmp_path / target, "--format", layout)
        assert result.exit_code == 0, result.output
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    found = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert found["config_groups"]["group_0"]["input_activations"] == activations
    for where in (folder, tmp_path / "epiloq"):
        result = run("inspect", where, "--json", tmp_path / "facts.json")
        assert result.exit_code == 0, result.output
        facts = json.loads((tmp_path / "facts.json").read_text())
        expected = {"groups": "fp8 in groups of 128", "static": "fp8 per static"}[kind]
        assert {(row["weights"], row["activations"]) for row in facts["kinds"]} == {(form, expected)}
        possible = {name for name, reason in facts["formats"].items() if reason is None}
        others = {"mxfp4 groups": {"deepseek-fp8"}, "nvfp4 static": {"modelopt"}}.get(f"{form} {kind}", set())
        assert possible == {"compressed-tensors", "epiloq"} | others
    for layout in others:
        result = run("convert", folder, tmp_path / layout, "--format", layout)
        assert result.exit_code == 0 and "will be quantised" not in result.output, result.output
        same = weights(tmp_path / layout)
        assert all(torch.equal(values, same[name]) for name, values in weights(folder).items())


def test_a_static_scale_must_be_there(folders: Path, tmp_path: Path) -> None:
    folder = with_activations(folders / "mxfp4", tmp_path / "model", STATIC)
    result = run("inspect", folder)
    shown = " ".join(result.output.split())
    assert result.exit_code == 2 and "input_scale" in shown, shown


@pytest.mark.parametrize("activations", [DYNAMIC, STATIC | INT8], ids=["dynamic", "int8"])
def test_scales_of_what_stays_in_floating_point_are_not_used(
    folders: Path, tmp_path: Path, activations: dict[str, Any]
) -> None:
    folder = with_activations(folders / "mxfp4", tmp_path / "model", activations, torch.tensor([0.02]))
    with pytest.warns(UserWarning, match="activations stay in floating point, not in (FP8|int8) per tensor"):
        model, _ = models.load(Checkpoint(folder))
    assert type(model.get_submodule(LAYER)) is Fp4Linear
