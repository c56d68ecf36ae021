"""FP8 checkpoints of the package compressed-tensors: its own, those that epiloq writes, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

import transformers
from safetensors.torch import load_file, save_file

import epiloq
import epiloq.integrations.transformers as integration
from command_line import ROUND, logits, quantize, run
from epiloq.formats import convert, epiloq_modules
from epiloq.formats.configs import compressed_tensors as ct_config
from epiloq.formats.description import Description, Inputs
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp8Linear
from rounded_models import same, weights
from tiny_teacher import tiny_model

# Other tests want transformers as it is.
integration.unregister()

UP = "model.layers.1.mlp.up_proj"
SCHEMES = {"fp8": ("tensor", "tensor"), "fp8-token": ("token", "channel")}
KINDS = [(activation, weight) for activation in ("token", "tensor", "static") for weight in ("channel", "tensor")]


@pytest.fixture(scope="module")
def ours(teacher: Path) -> Path:
    """The teacher by ``epiloq quantize`` in each scheme, in this format by default."""
    for scheme in SCHEMES:
        result = quantize(teacher, teacher.with_name(scheme), "--scheme", scheme)
        assert result.exit_code == 0, result.output
    return teacher.parent


def described(activation: str, weight: str) -> Description:
    inputs = Inputs("fp8", "token" if activation == "token" else "tensor", activation != "static")
    return Description("float-quantized", "fp8", strategy=weight, inputs=inputs)


def fp8_layers(model: nn.Module) -> dict[str, Fp8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


def by_the_package(teacher: Path, folder: Path, activation: str, weight: str, dtype: torch.dtype) -> Path:
    """The teacher by compressed-tensors' own functions, from the scheme to the files."""
    q = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = models.load_float(Checkpoint(teacher)).to(dtype)
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    strategy = {"token": "token"}.get(activation, "tensor")
    described = q.QuantizationScheme(
        targets=["Linear"],
        weights=q.QuantizationArgs(**args, strategy=weight, dynamic=False),
        input_activations=q.QuantizationArgs(**args, strategy=strategy, dynamic=activation != "static"),
    )
    q.apply_quantization_config(model, q.QuantizationConfig(config_groups={"group_0": described}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            low, high = module.weight.aminmax(dim=1, keepdim=True) if weight == "channel" else module.weight.aminmax()
            scale, _ = helpers.calculate_qparams(low, high, described.weights)
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
            if activation == "static":
                module.input_scale.data.fill_(0.0125)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def logits_by_equal_layers(theirs: nn.Module, layers: dict[str, Fp8Linear]) -> torch.Tensor:
    """Their logits, after each of their layers gave what ours gives on the same inputs.

    Logits are not compared: sums in another order move some activations to the next FP8 number in the layers after.
    """
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in layers:
        theirs.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: (inputs[0], output)})
        )
    found = logits(theirs)
    for name, layer in layers.items():
        x, y = seen[name]
        torch.testing.assert_close(layer.float()(x), y, rtol=1e-5, atol=1e-5 * float(y.abs().max()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "weight"), KINDS)
def test_written_by_the_package(
    teacher: Path, tmp_path: Path, activation: str, weight: str, dtype: torch.dtype
) -> None:
    folder = by_the_package(teacher, tmp_path / "in", activation, weight, dtype)
    model, _ = models.load(Checkpoint(folder))
    layers, tensors = fp8_layers(model), load_file(folder / "model.safetensors")
    assert len(layers) == 14 and {(layer.activation, layer.weight_scales) for layer in layers.values()} == {
        (activation, weight)
    }
    for name, layer in layers.items():
        state = layer.file_state()
        assert torch.equal(state["weight"].view(torch.uint8), tensors[f"{name}.weight"].view(torch.uint8))
        assert tensors[f"{name}.weight_scale"].dtype == dtype
        assert torch.equal(state["weight_scale"], tensors[f"{name}.weight_scale"].float().flatten())
        assert activation != "static" or torch.equal(state["input_scale"], tensors[f"{name}.input_scale"].float())
    # In float32, for they restore weights and activations in the model's type before they multiply.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = logits_by_equal_layers(theirs, layers)
    exact = logits(models.load_float(Checkpoint(teacher)))
    assert float((expected - exact).norm() / exact.norm()) > 0.005  # They too round activations.


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize(("activation", "weight"), KINDS)
def test_opened_and_saved_by_transformers(teacher: Path, tmp_path: Path, activation: str, weight: str) -> None:
    folder = by_the_package(teacher, tmp_path / "in", activation, weight, torch.bfloat16)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    read, _ = models.load(Checkpoint(folder))
    assert len(fp8_layers(found)) == 14 and torch.equal(logits(found), logits(read))
    found.save_pretrained(tmp_path / "again")
    assert Checkpoint(tmp_path / "again").quantization == Checkpoint(folder).quantization
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(found)) and same(weights(tmp_path / "again"), weights(folder))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_package_reads_what_epiloq_writes(ours: Path, scheme: str) -> None:
    schemas = pytest.importorskip("compressed_tensors.quantization")
    message = Checkpoint(ours / scheme).quantization
    assert message is not None
    group = schemas.QuantizationConfig.model_validate(message).config_groups["group_0"]
    activation, weight = SCHEMES[scheme]
    assert (group.weights.type, group.weights.strategy, group.weights.dynamic) == ("float", weight, False)
    assert (group.input_activations.strategy, group.input_activations.dynamic) == (activation, True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(ours / scheme, dtype="auto")
    model, _ = models.load(Checkpoint(ours / scheme))
    logits_by_equal_layers(theirs, fp8_layers(model))
    for name, layer in fp8_layers(model).items():
        state = layer.file_state()
        values = state["weight"].float() * state["weight_scale"].view(-1, 1)
        assert torch.equal(theirs.get_parameter(f"{name}.weight"), values), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_converted_and_back(ours: Path, tmp_path: Path, scheme: str) -> None:
    """Tensors and configuration are those that it began with, bit for bit."""
    source = ours / scheme
    for before, after, layout in (
        (source, tmp_path / "epiloq", "epiloq"),
        (tmp_path / "epiloq", tmp_path / "back", "compressed-tensors"),
    ):
        result = run("convert", before, after, "--format", layout)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "back" / "config.json").read_text() == (source / "config.json").read_text()
    one, other = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)
    expected, _ = models.load(Checkpoint(source))
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "epiloq"))[0]), logits(expected))
    again = epiloq.quantize_(models.load_float(Checkpoint(ours / "model")), scheme)
    assert torch.equal(logits(again), logits(expected))


def test_static_scales_convert(teacher: Path, tmp_path: Path) -> None:
    folder = by_the_package(teacher, tmp_path / "in", "static", "tensor", torch.bfloat16)
    convert.perform(convert.prepare(folder, tmp_path / "epiloq", "epiloq"))
    convert.perform(convert.prepare(tmp_path / "epiloq", tmp_path / "back", "compressed-tensors"))
    found = [logits(models.load(Checkpoint(path))[0]) for path in (folder, tmp_path / "epiloq", tmp_path / "back")]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inspected_and_evaluated(ours: Path, tmp_path: Path, scheme: str) -> None:
    result = run("inspect", ours / scheme, "--check", "--json", tmp_path / "i.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "i.json").read_text())
    assert (found["format"], found["version"], found["scheme"]) == ("compressed-tensors", "float-quantized", scheme)
    also = {"modelopt"} if scheme == "fp8-token" else set()
    fitting = {name for name, reason in found["formats"].items() if reason is None}
    assert fitting == {"compressed-tensors", "epiloq"} | also
    assert found["wrong"] == {} and {row["weights"] for row in found["kinds"]} == {"fp8"}
    result = run("eval", ours / scheme, "--text", ours / "text.txt", "--length", 32, "--json", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "e.json").read_text())["quantization"] == "compressed-tensors"


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("fp8-token", lambda t: {"weight_scale": t["weight_scale"][1:]}, r"weight_scale: expected .* \[96, 1\]"),
        ("fp8-token", lambda t: {"weight_scale": t["weight_scale"].flatten()}, r"weight_scale: expected .* \[96, 1\]"),
        ("fp8-token", lambda t: {"weight_scale": t["weight_scale"].int()}, "weight_scale: expected floating point"),
        ("fp8", lambda t: {"weight_scale": t["weight_scale"].expand(96, 1)}, r"weight_scale: expected .* \[1\]"),
        ("fp8", lambda t: {"weight_scale": None}, rf"{UP}.weight: expected torch.float32 .*, got F8_E4M3"),
        ("fp8", lambda t: {"input_scale": torch.ones(1)}, "expected of a layer .*, weight, .*, got input_scale"),
        ("fp8", lambda t: {"weight": t["weight"].to(torch.float8_e5m2)}, "weight: expected torch.float8_e4m3fn"),
        ("fp8", lambda t: {"weight": t["weight"][:, 1:]}, r"weight: expected torch.float8_e4m3fn \[96, 64\]"),
    ],
)
def test_tensors_that_disagree(
    ours: Path, tmp_path: Path, scheme: str, change: Callable[[dict[str, Tensor]], dict[str, Any]], message: str
) -> None:
    shutil.copytree(ours / scheme, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    layer = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{UP}.")}
    changed = {**tensors, **{f"{UP}.{part}": tensor for part, tensor in change(layer).items()}}
    held = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(held, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=message) as error:
        models.load(Checkpoint(tmp_path / "in"))
    assert UP in str(error.value) and "model.safetensors" in str(error.value)


def test_static_directories_need_their_scales(teacher: Path, tmp_path: Path) -> None:
    folder = by_the_package(teacher, tmp_path / "in", "static", "tensor", torch.float32)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{UP}.input_scale"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=rf"{UP}: input_scale: expected a tensor, found none"):
        models.load(Checkpoint(folder))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "weights",
            {"strategy": "block", "block_structure": [128, 128]},
            r"input_activations: .*\(group\), got FP8 per token",
        ),
        ("weights", {"num_bits": 6}, "weights: expected symmetric floats of 4 or 8 bits"),
        ("weights", {"strategy": "group", "group_size": 128}, r"input_activations: .*\(group\), got FP8 per token"),
        ("weights", {"num_bits": 4}, "weights: expected symmetric FP4, tensor_group of 16 or group of 32, .*'channel'"),
        ("weights", {"symmetric": False}, "weights: expected symmetric floats of 4 or 8 bits"),
        ("input_activations", {"type": "int"}, r"input_activations: expected symmetric FP8 .*int8 per"),
        (
            "input_activations",
            {"strategy": "group", "group_size": 128},
            "input_activations: .*got FP8 per group of 128",
        ),
        ("input_activations", {"dynamic": "local"}, "input_activations: .*'local'"),
        ("input_activations", {"num_bits": 4}, "input_activations: num_bits: expected 8, got 4"),
        ("output_activations", {"num_bits": 8}, "output_activations: expected none"),
        ("format", "int-quantized", "format: expected float-quantized, got 'int-quantized'"),
        ("targets", ["re:(.*proj"], "expected a regular expression, got '\\(.*proj'"),
        ("targets", [], "config_groups: targets: expected names"),
    ],
)
def test_configurations_that_no_layer_runs(part: str, change: Any, message: str) -> None:
    config = ct_config.config({"layer": described("token", "channel")}, ["lm_head"])
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_0"] = group | {
        part: {**group.get(part, {}), **change} if isinstance(change, dict) else change
    }
    with pytest.raises(FormatError, match=f"compressed-tensors: {message}"):
        ct_config.parse(config)


def test_the_former_name_of_the_layout(ours: Path, tmp_path: Path) -> None:
    shutil.copytree(ours / "fp8-token", tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    config = json.loads(file.read_text())
    message = config["quantization_config"] | {"format": "naive-quantized", "quantization_status": "frozen"}
    del message["config_groups"]["group_0"]["format"]
    file.write_text(json.dumps(config | {"quantization_config": message}))
    expected, _ = models.load(Checkpoint(ours / "fp8-token"))
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "in"))[0]), logits(expected))


def test_omitted_arguments_have_the_packages_defaults() -> None:
    pytest.importorskip("compressed_tensors")
    schemas = pytest.importorskip("compressed_tensors.quantization")
    blocks = replace(described("token", "block"), block=(128, 128), inputs=Inputs("fp8", "group", group_size=128))
    for one in [*(described(*kind) for kind in KINDS), blocks]:
        config = ct_config.config({"layer": one}, ["lm_head"])
        assert ct_config.parse(config)(["layer"], nn.Linear) == one
        group = schemas.QuantizationConfig.model_validate(config).config_groups["group_0"].model_dump(mode="json")
        for part in ("weights", "input_activations"):
            usual = schemas.QuantizationArgs(type="float").model_dump(mode="json")
            message = {key: value for key, value in group[part].items() if value != usual.get(key) or key == "type"}
            config["config_groups"]["group_0"][part] = message
        assert ct_config.parse(config)(["layer"], nn.Linear) == one


def test_conversions_that_are_refused(ours: Path, tmp_path: Path) -> None:
    for target in ("gptq", "awq", "deepseek-fp8"):
        with pytest.raises(FormatError, match=r"cannot represent Fp8Linear\(activation='token', weight='channel'\)"):
            convert.prepare(ours / "fp8-token", tmp_path / "out", target)
    mixed = epiloq.quantize_(tiny_model(**ROUND), "fp8", lambda module, name: name.endswith("q_proj"))
    epiloq_modules.save(epiloq.quantize_(mixed, "fp8-token"), tmp_path / "mixed")
    assert [path.name for path in tmp_path.iterdir()] == ["mixed"]


def test_layers_that_differ_are_in_groups(tmp_path: Path) -> None:
    mixed = epiloq.quantize_(tiny_model(**ROUND), "fp8", lambda module, name: name.endswith("q_proj"))
    epiloq_modules.save(epiloq.quantize_(mixed, "fp8-token"), tmp_path / "mixed")
    convert.perform(convert.prepare(tmp_path / "mixed", tmp_path / "out", "compressed-tensors"))
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["targets"] for group in found.values()] == [
        ["Linear"],
        [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)],
    ]
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "out"))[0]), logits(mixed))
