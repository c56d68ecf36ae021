"""Directories of NVIDIA's ModelOpt: NVFP4, MXFP4 and FP8, as its exporters lay them out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from command_line import run
from epiloq.formats import convert
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp4Linear, Fp8Linear, Fp8WeightOnlyLinear, W4A8Fp4Linear, WeightOnlyLinear
from modelopt_layers import fp8, fp8_blocks, fp8_rows, int4, int4_fp8, mxfp4, mxfp8, nvfp4, unpacked
from opened_models import logits, opened
from rounded_models import same, weights

# Other tests want transformers as it is.
integration.unregister()

UP = "model.layers.0.mlp.up_proj"
FLAT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.39.0"}, "ignore": ["lm_head"]}
_FP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
GROUPS = {"group_0": {"input_activations": _FP4, "weights": _FP4, "targets": ["Linear"]}}
CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}
KINDS: dict[str, tuple[Callable[[nn.Linear], foreign.Layer], dict[str, Any], type[nn.Module]]] = {
    "NVFP4": (nvfp4, {"config_groups": GROUPS, "group_size": 16}, Fp4Linear),
    "W4A16_NVFP4": (lambda linear: nvfp4(linear, inputs=None), {"group_size": 16}, Fp4Linear),
    "W4A8_MXFP4_FP8": (mxfp4, {"group_size": 32}, Fp4Linear),
    "NVFP4_AWQ": (nvfp4, {"has_zero_point": False, "pre_quant_scale": True}, Fp4Linear),
    "W4A8_NVFP4_FP8": (lambda linear: nvfp4(linear, inputs=0.02), {"group_size": 16}, W4A8Fp4Linear),
    "W4A16_AWQ": (int4, {"group_size": 32, "has_zero_point": False, "pre_quant_scale": True}, WeightOnlyLinear),
    "W4A8_AWQ": (int4_fp8, {"group_size": 32}, WeightOnlyLinear),
    "FP8_PB_WO": (fp8_blocks, {}, Fp8WeightOnlyLinear),
    "MXFP8": (mxfp8, {"group_size": 32}, Fp8WeightOnlyLinear),
    "FP8": (fp8, {"kv_cache_scheme": CACHE}, Fp8Linear),
    "FP8_PER_CHANNEL_PER_TOKEN": (fp8_rows, {}, Fp8Linear),
}


def assert_opened(folder: Path, exact: Any, kind: type[nn.Module], tmp_path: Path) -> None:
    """By epiloq and through transformers, saved as it was, and converted to epiloq's own format."""
    model, _ = models.load(Checkpoint(folder))
    assert isinstance(model.get_submodule(UP), kind)
    for layer, values in weights(folder).items():
        torch.testing.assert_close(values, exact.get_parameter(layer), rtol=2**-23, atol=0)
    expected, wanted = logits(model), logits(exact)
    assert float((expected - wanted).norm() / wanted.norm()) < (0.15 if kind in (Fp8Linear, W4A8Fp4Linear) else 1e-5)
    theirs = opened(folder)
    assert torch.equal(logits(theirs), expected)
    theirs.save_pretrained(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].shape == tensor.shape and torch.equal(after[name].view(-1), tensor.view(-1)), name
    convert.perform(convert.prepare(folder, tmp_path / "epiloq", "epiloq"))
    assert torch.equal(logits(models.load(Checkpoint(tmp_path / "epiloq"))[0]), expected)
    assert same(weights(tmp_path / "epiloq"), weights(folder))


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
@pytest.mark.filterwarnings("ignore:.*key-value cache stays")
@pytest.mark.parametrize("algorithm", KINDS)
def test_opened_everywhere(algorithm: str, seed: int, tmp_path: Path) -> None:
    pack, text, kind = KINDS[algorithm]
    config = FLAT | text | {"quant_algo": algorithm}
    exact = foreign.write_as(tmp_path / "in", foreign.llama(), lambda _, linear: pack(linear), config, shards=1)
    if "kv_cache_scheme" in text:
        tensors = load_file(tmp_path / "in" / "model.safetensors")
        for part in "kv":
            tensors[f"model.layers.0.self_attn.{part}_proj.{part}_scale"] = torch.tensor(0.5)
        save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    assert_opened(tmp_path / "in", exact, kind, tmp_path)
    result = run("inspect", tmp_path / "in", "--check")
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
@pytest.mark.filterwarnings("ignore:.*key-value cache stays")
@pytest.mark.parametrize("cache", [None, "FP8", "NVFP4", "INT8", "NVFP4_AFFINE"])
def test_described_beside_config_json(cache: str | None, seed: int, tmp_path: Path) -> None:
    """Older exports have hf_quant_config.json alone, with patterns of layers that stay as they are."""
    left = ["lm_head", "*.o_proj", "model.layers.1*"]

    def pack(name: str, linear: nn.Linear) -> foreign.Layer | None:
        return None if name.startswith("model.layers.1.") or name.endswith("o_proj") else nvfp4(linear)

    exact = foreign.write_as(tmp_path / "in", foreign.llama(), pack, None, shards=1)
    text = {"quant_algo": "NVFP4", "kv_cache_quant_algo": cache, "group_size": 16, "exclude_modules": left}
    producer = {"name": "modelopt", "version": "0.23.0"}
    if cache == "NVFP4_AFFINE":
        tensors = load_file(tmp_path / "in" / "model.safetensors")
        for part in "kv":
            tensors[f"model.layers.0.self_attn.{part}_proj.{part}_scale"] = torch.tensor(0.5)
            tensors[f"model.layers.0.self_attn.{part}_proj.{part}_bias"] = torch.rand(1, 2, 1, 8)
        save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "in" / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": text}))
    if cache is None:
        assert_opened(tmp_path / "in", exact, Fp4Linear, tmp_path)
        assert not (tmp_path / "epiloq" / "hf_quant_config.json").exists()
        return
    with pytest.warns(UserWarning, match="the key-value cache stays in the model's type"):
        model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert type(model.get_submodule("model.layers.0.self_attn.o_proj")) is nn.Linear


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_layers_of_several_algorithms(seed: int, tmp_path: Path) -> None:
    """By names of layers or of what holds them, of which the longest counts."""

    def pack(name: str, linear: nn.Linear) -> foreign.Layer | None:
        return (fp8 if "self_attn" in name or name == UP else nvfp4)(linear)

    layers: dict[str, Any] = {f"model.layers.{i}": {"quant_algo": "NVFP4", "group_size": 16} for i in range(2)}
    layers |= {f"model.layers.{i}.self_attn": {"quant_algo": "FP8"} for i in range(2)} | {UP: {"quant_algo": "FP8"}}
    config = FLAT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    exact = foreign.write_as(tmp_path / "in", foreign.llama(), pack, config, shards=1)
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert type(model.get_submodule(UP)) is Fp8Linear
    assert type(model.get_submodule(UP.replace("up", "down"))) is Fp4Linear
    for layer, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(values, exact.get_parameter(layer), rtol=2**-23, atol=0)


UNNAMED = {"ignore": ["lm_head"], "quant_algo": "FP8", "quant_library": "modelopt"}
NAMED_BY_PRODUCER = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": None}}


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.filterwarnings("ignore:.*key-value cache stays")
@pytest.mark.parametrize("config", [UNNAMED, UNNAMED | {"kv_cache_scheme": "FP8"}, NAMED_BY_PRODUCER])
def test_earlier_versions_named_no_method(config: dict[str, Any], seed: int, tmp_path: Path) -> None:
    exact = foreign.write_as(tmp_path / "in", foreign.llama(), lambda _, linear: fp8(linear), config, shards=1)
    assert_opened(tmp_path / "in", exact, Fp8Linear, tmp_path)


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_layers_are_described_in_the_other_file(seed: int, tmp_path: Path) -> None:
    """Earlier versions left them out of config.json."""

    def pack(name: str, linear: nn.Linear) -> foreign.Layer:
        return nvfp4(linear) if ".mlp." in name else fp8(linear)

    config = UNNAMED | {"quant_algo": "MIXED_PRECISION"}
    model = foreign.llama()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    entries = {True: {"quant_algo": "NVFP4", "group_size": 16}, False: {"quant_algo": "FP8"}}
    layers = {name: entries[".mlp." in name] for name in names}
    exact = foreign.write_as(tmp_path / "in", model, pack, config, shards=1)
    with pytest.raises(FormatError, match="quantized_layers: expected what each layer is quantised to"):
        models.load(Checkpoint(tmp_path / "in"))
    beside = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (tmp_path / "in" / "hf_quant_config.json").write_text(json.dumps(beside))
    expected = logits(models.load(Checkpoint(tmp_path / "in"))[0])
    assert float((expected - logits(exact)).norm() / logits(exact).norm()) < 0.15
    theirs = opened(tmp_path / "in")
    assert torch.equal(logits(theirs), expected)
    theirs.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(opened(tmp_path / "saved")), expected)


@pytest.mark.usefixtures("epiloq_in_transformers")
def test_only_the_cache_is_quantised(seed: int, tmp_path: Path) -> None:
    config = FLAT | {"kv_cache_scheme": _FP4}
    exact = foreign.write_as(tmp_path / "in", foreign.llama(), lambda *_: None, config, shards=1)
    with pytest.warns(UserWarning, match="the key-value cache stays in the model's type"):
        model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert torch.equal(logits(model), logits(exact))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "smoothed": ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, "quant_algo: W8A8_SQ_PER_CHANNEL is int8 inputs by a stored"),
    "int8 of TensorRT-LLM": ({"quant_algo": "w8a16"}, "quant_algo: w8a16 is int8 weights in the layout of TensorRT"),
    "blocks of 64": ({"quant_algo": "MXFP8", "group_size": 64}, "group_size: expected 32 of MXFP8, got 64"),
    "thin matrices": (
        {"quant_algo": "NVFP4_SVD", "config_groups": {"group_0": {"pre_quant_scale": True}}},
        "quant_algo: NVFP4_SVD is FP4 weights plus",
    ),
    "an algorithm that is none": ({"quant_algo": "NVFP3"}, "quant_algo: expected one of NVFP4, NVFP4_AWQ"),
    "no algorithm": ({"quant_algo": None}, "quant_algo: expected one of NVFP4"),
    "other blocks": ({"group_size": 32}, "group_size: expected 16 of NVFP4, got 32"),
    "scales of input channels": ({"pre_quant_scale": True}, "pre_quant_scale: epiloq does not know"),
    "them in a group": ({"config_groups": {"group_0": {"pre_quant_scale": True}}}, "pre_quant_scale: epiloq does not"),
    "another cache": ({"kv_cache_scheme": "INT4"}, "kv_cache_quant_algo: expected FP8 or INT8 or NVFP4 or"),
    "a cache of 4 bits": ({"kv_cache_scheme": CACHE | {"num_bits": 4}}, "kv_cache_quant_algo: expected FP8 or INT8"),
    "groups of none": (
        {"quant_algo": "W4A16_AWQ", "group_size": -1},
        "group_size: expected a positive number of W4A16",
    ),
    "no layers": ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers: expected what each layer is quantised to"),
    "a layer's own entries": (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {UP: {"quant_algo": "NVFP4", "csf": 1}}},
        f"quantized_layers: {UP}: csf: epiloq does not know",
    ),
    "layers that it leaves out": ({"ignore": ["*.up_proj"]}, f"leaves {UP} in floating point"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused_by_name(what: str, seed: int, tmp_path: Path) -> None:
    change, message = WRONG[what]
    config = FLAT | {"quant_algo": "NVFP4", "group_size": 16} | change
    foreign.write_as(tmp_path / "in", foreign.llama(), lambda _, linear: nvfp4(linear), config, shards=1)
    with pytest.raises(FormatError) as refused:
        models.load(Checkpoint(tmp_path / "in"))
    assert message in str(refused.value), str(refused.value)


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_merged_scales_without_padding(seed: int, tmp_path: Path) -> None:
    config = FLAT | {"quant_algo": "fp8_pb_wo"}
    exact = foreign.write_as(tmp_path / "in", foreign.llama(), lambda _, x: fp8_blocks(x, True), config, shards=1)
    for layer, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(values, exact.get_parameter(layer), rtol=2**-23, atol=0)


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_int4_without_a_group_size(seed: int, tmp_path: Path) -> None:
    """config.json says nothing of it: 128 as ModelOpt's own configurations have it, which must fill the columns."""
    config = FLAT | {"quant_algo": "W4A16_AWQ"}
    foreign.write_as(tmp_path / "in", foreign.llama(), lambda _, linear: int4(linear), config, shards=1)
    with pytest.raises(FormatError, match="128"):
        models.load(Checkpoint(tmp_path / "in"))


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
@pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_scale_2"])
def test_damaged_tensors_are_named(part: str, seed: int, tmp_path: Path) -> None:
    config = FLAT | {"quant_algo": "NVFP4"}
    foreign.write_as(tmp_path / "in", foreign.llama(), lambda _, linear: nvfp4(linear), config, shards=1)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    for wrong in (torch.ones(3, 2), torch.zeros(()) if part == "weight_scale_2" else torch.ones(1).half()):
        changed = tensors | {f"{UP}.{part}": wrong}
        save_file(changed, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(FormatError, match=rf"{UP}.*{part}: expected"):
            models.load(Checkpoint(tmp_path / "in"))


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("scheme", ["w4a16-nvfp4", "fp8-token", "w8a16-fp8-block"])
def test_written(scheme: str, seed: int, tmp_path: Path) -> None:
    """Quantised to ModelOpt's layout, and converted to it: the factor is the number that compressed-tensors divides
    by."""
    foreign.write_as(tmp_path / "model", foreign.llama(), lambda *_: None, None, shards=1)
    options = ("--scheme", scheme, "--algorithm", "rtn")
    for layout in ("modelopt", "compressed-tensors"):
        result = run("quantize", tmp_path / "model", *options, "--format", layout, "--output", tmp_path / layout)
        assert result.exit_code == 0, result.output
    result = run("convert", tmp_path / "compressed-tensors", tmp_path / "converted", "--format", "modelopt")
    assert result.exit_code == 0, result.output
    tensors = load_file(tmp_path / "modelopt" / "model.safetensors")
    assert same(tensors, load_file(tmp_path / "converted" / "model.safetensors"))
    for folder in (tmp_path / "modelopt", tmp_path / "converted"):
        text = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert (text["quant_method"], "lm_head" in text["ignore"]) == ("modelopt", True)
        algorithms = {"w4a16-nvfp4": "W4A16_NVFP4", "fp8-token": "FP8_PER_CHANNEL_PER_TOKEN"}
        assert text["quant_algo"] == algorithms.get(scheme, "FP8_PB_WO")
        assert same(weights(folder), weights(tmp_path / "compressed-tensors"))
    shape = tuple(tensors[f"{UP}.weight"].shape)
    if "fp8" in scheme:
        blocks = (-(-shape[0] // 128), 1, -(-shape[1] // 128), 1)
        assert tensors[f"{UP}.weight_scale"].shape == (shape[:1] if scheme == "fp8-token" else blocks)
        return
    exact = unpacked(tensors[f"{UP}.weight"]).view(shape[0], -1, 16)
    exact = exact * (tensors[f"{UP}.weight_scale"].float() * tensors[f"{UP}.weight_scale_2"]).unsqueeze(2)
    assert torch.equal(exact.view(shape[0], -1), weights(tmp_path / "modelopt")[f"{UP}.weight"])
    assert tensors[f"{UP}.weight_scale_2"].shape == ()
    theirs = load_file(tmp_path / "compressed-tensors" / "model.safetensors")
    assert torch.equal(tensors[f"{UP}.weight_scale_2"], theirs[f"{UP}.weight_global_scale"].reciprocal().squeeze())


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_factors_without_a_reciprocal_are_not_rounded(seed: int, tmp_path: Path) -> None:
    """compressed-tensors stores reciprocals: a factor that is none of a float32 number is refused, others stay."""
    # Between two of these lie two units in the last place of the reciprocal.
    divisors = 260 + torch.arange(64) * 2.0**-15
    found = set(divisors.reciprocal().tolist())
    between = divisors[:-1].reciprocal()
    missed = torch.nextafter(between, torch.zeros(()))
    refused = next(factor for factor in missed if factor.item() not in found)
    hold = divisors[5].reciprocal()
    for name, factor in (("held", hold), ("refused", refused)):

        def pack(_: str, linear: nn.Linear, factor: Tensor = factor) -> foreign.Layer:
            tensors, _ = nvfp4(linear)
            exact = unpacked(tensors["weight"]).view(linear.out_features, -1, 16)
            exact = exact * (tensors["weight_scale"].float() * factor).unsqueeze(2)
            return tensors | {"weight_scale_2": factor.clone()}, exact.view(linear.weight.shape)

        config = FLAT | {"quant_algo": "NVFP4"}
        foreign.write_as(tmp_path / name, foreign.llama(), pack, config, shards=1)
        result = run("convert", tmp_path / name, tmp_path / f"{name}-ct", "--format", "compressed-tensors")
        if name == "held":
            assert result.exit_code == 0, result.output
            assert same(weights(tmp_path / "held-ct"), weights(tmp_path / "held"))
        else:
            text = " ".join(result.output.split())
            assert result.exit_code == 2 and "float32 has no number whose reciprocal it is" in text, text
            assert not (tmp_path / "refused-ct").exists()
