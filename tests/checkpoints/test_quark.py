"""Directories of AMD's Quark in MXFP4, FP8 and integers, as its exporter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from safetensors.torch import load_file
from torch import nn

import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
import foreign_variants
from command_line import run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp4Linear, Fp8Linear, Fp8WeightOnlyLinear, Int8Linear, W4A8Linear, WeightOnlyLinear
from opened_models import logits, opened
from rounded_models import same, weights

# Other tests want transformers as it is.
integration.unregister()

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NUMBERS: dict[str, Any] = {
    "ch_axis": -1,
    "dtype": "fp4",
    "group_size": 32,
    "is_dynamic": False,
    "is_scale_quant": False,
    "mx_element_dtype": None,
    "observer_cls": "PerBlockMXObserver",
    "qscheme": "per_group",
    "round_method": "half_even",
    "scale_calculation_mode": "even",
    "scale_format": "e8m0",
    "scale_type": "float",
    "symmetric": None,
}
LAYER = {
    "bias": None,
    "input_tensors": NUMBERS | {"is_dynamic": True},
    "output_tensors": None,
    "target_device": None,
    "weight": NUMBERS,
}
NOTHING = {"weight": None, "input_tensors": None}
CONFIG: dict[str, Any] = {
    "algo_config": None,
    "exclude": ["lm_head", "re:.*self_attn.*"],
    "export": {
        "kv_cache_group": [],
        "min_kv_scale": 0.0,
        "pack_method": "reorder",
        "weight_format": "real_quantized",
        "weight_merge_groups": None,
    },
    "global_quant_config": LAYER,
    "kv_cache_post_rope": False,
    "kv_cache_quant_config": {},
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "quant_method": "quark",
    "quant_mode": "eager_mode",
    "softmax_quant_spec": None,
    "version": "0.11",
}


def mxfp4(name: str, linear: nn.Linear) -> foreign.Layer | None:
    """Four bits of each of 32 numbers, little end first, as ``Pack_mxfp4`` packs them, and a byte of an exponent."""
    if "self_attn" in name:
        return None
    n, k = linear.weight.shape
    codes = torch.randint(0, 16, (n, k))
    exponents = torch.randint(117, 122, (n, k // 32), dtype=torch.uint8)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    factors = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {"weight": packed, "weight_scale": exponents}, E2M1[codes] * factors


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_opened_everywhere(seed: int, tmp_path: Path) -> None:
    exact = foreign.write_as(tmp_path / "in", foreign.llama(), mxfp4, CONFIG, shards=1)
    with pytest.warns(UserWarning, match="activations stay in floating point, not in FP4"):
        model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert isinstance(model.get_submodule(UP), Fp4Linear)
    assert type(model.get_submodule("model.layers.0.self_attn.o_proj")) is nn.Linear
    for layer, values in weights(tmp_path / "in").items():
        assert torch.equal(values, exact.get_parameter(layer))
    assert torch.allclose(logits(model), logits(exact), rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match="activations stay in floating point"):
        theirs = opened(tmp_path / "in")
    assert torch.equal(logits(theirs), logits(model))
    theirs.save_pretrained(tmp_path / "saved")
    assert same(*(load_file(tmp_path / name / "model.safetensors") for name in ("in", "saved")))
    with pytest.warns(UserWarning, match="activations stay in floating point"):
        result = run("convert", tmp_path / "in", tmp_path / "ct", "--format", "compressed-tensors")
    assert result.exit_code == 0, result.output
    assert same(weights(tmp_path / "ct"), weights(tmp_path / "in"))


@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_layers_by_pattern(seed: int, tmp_path: Path) -> None:
    """A layer's own entry counts before the others', and may leave it in floating point."""
    own = {"layer_quant_config": {"*.down_proj": LAYER | {"weight": None, "input_tensors": None}}}

    def pack(name: str, linear: nn.Linear) -> foreign.Layer | None:
        return None if name.endswith("down_proj") else mxfp4(name, linear)

    foreign.write_as(tmp_path / "in", foreign.llama(), pack, CONFIG | own, shards=1)
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert isinstance(model.get_submodule(UP), Fp4Linear) and type(model.get_submodule(DOWN)) is nn.Linear


FP8 = NUMBERS | {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "group_size": None, "ch_axis": None}
FP8 |= {"scale_format": None, "scale_calculation_mode": None, "observer_cls": "PerTensorMinMaxObserver"}
TOKENS = FP8 | {"qscheme": "per_channel", "is_dynamic": True, "ch_axis": 0}
FP8_KINDS: dict[str, tuple[foreign_variants.Pack, dict[str, Any], type[nn.Module]]] = {
    "static": (
        foreign_variants.fp8("weight_scale", -1, -1, shape=("", ()), inputs=("input_scale", ())),
        LAYER | {"weight": FP8, "input_tensors": FP8},
        Fp8Linear,
    ),
    "dynamic": (
        foreign_variants.fp8("weight_scale", -1, -1, shape=("", ())),
        LAYER | {"weight": FP8, "input_tensors": FP8 | {"is_dynamic": True}},
        Fp8Linear,
    ),
    "per channel and token": (
        foreign_variants.fp8("weight_scale", 1, -1, shape=("", (-1,))),
        LAYER | {"weight": FP8 | {"qscheme": "per_channel", "ch_axis": 0}, "input_tensors": TOKENS},
        Fp8Linear,
    ),
    "weights alone": (
        foreign_variants.fp8("weight_scale", -1, -1, shape=("", ())),
        LAYER | {"weight": FP8, "input_tensors": None},
        Fp8WeightOnlyLinear,
    ),
}


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.filterwarnings("ignore:.*key-value cache stays")
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
@pytest.mark.parametrize("name", FP8_KINDS)
def test_fp8(seed: int, tmp_path: Path, name: str, cached: bool) -> None:
    """A cache in FP8 is described by outputs of the layers of keys and values, whose files have scales of them."""
    pack, layer, module = FP8_KINDS[name]
    config, group = {**CONFIG, "exclude": ["lm_head"], "global_quant_config": layer}, ["*k_proj", "*v_proj"]
    if cached:
        config["export"] = CONFIG["export"] | {"kv_cache_group": group}
        config["layer_quant_config"] = {part: layer | {"output_tensors": FP8} for part in group}
        config["kv_cache_quant_config"] = {part: LAYER | NOTHING | {"output_tensors": FP8} for part in group}

    def packed(name: str, linear: nn.Linear) -> foreign.Layer | None:
        found = pack(name, linear)
        if found is not None and cached and name.endswith(("k_proj", "v_proj")):
            found[0]["output_scale"] = torch.ones(())
        return found

    exact = foreign.write_as(tmp_path / "in", foreign.llama(), packed, config, shards=1)
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert type(model.get_submodule(UP)) is module
    for parameter, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(values, exact.get_parameter(parameter), rtol=2**-23, atol=0)
    found, wanted = logits(model), logits(exact)
    assert float((found - wanted).norm() / wanted.norm()) < (0.15 if module is Fp8Linear else 1e-5)
    theirs = opened(tmp_path / "in")
    assert torch.equal(logits(theirs), found)
    theirs.save_pretrained(tmp_path / "saved")
    assert same(*(load_file(tmp_path / name / "model.safetensors") for name in ("in", "saved")))


INT = NUMBERS | {"group_size": None, "ch_axis": None, "scale_format": None, "scale_calculation_mode": None}
INT |= {"observer_cls": "PerTensorMinMaxObserver", "symmetric": True, "zero_point_type": "int32"}
INT8_TOKEN = INT | {"dtype": "int8", "qscheme": "per_token", "is_dynamic": True}


def groups(dtype: str, size: int = 32, symmetric: bool = False) -> dict[str, Any]:
    return INT | {"dtype": dtype, "qscheme": "per_group", "group_size": size, "ch_axis": 1, "symmetric": symmetric}


def channels(dtype: str, symmetric: bool = True) -> dict[str, Any]:
    return INT | {"dtype": dtype, "qscheme": "per_channel", "ch_axis": 0, "symmetric": symmetric}


def tensor(dtype: str, symmetric: bool = True) -> dict[str, Any]:
    return INT | {"dtype": dtype, "qscheme": "per_tensor", "symmetric": symmetric}


class Integers:
    """A layer as Quark's exporter packs it: ``(q - zero) * scale``, groups transposed, eight of 4 bits a word."""

    def __init__(self, numbers: dict[str, Any], order: str = "reorder", inputs: bool = False, stated: bool = True):
        self.numbers, self.inputs, self.stated = numbers, inputs, stated
        self.order = [0, 2, 4, 6, 1, 3, 5, 7] if order == "reorder" else list(range(8))

    def words(self, values: torch.Tensor) -> torch.Tensor:
        if not self.numbers["dtype"].endswith("4"):
            return values.to(torch.uint8 if self.numbers["dtype"] == "uint8" else torch.int8)
        eights = (values.long() & 15).view(*values.shape[:-1], -1, 8)[..., self.order]
        return (eights << 4 * torch.arange(8)).sum(-1).to(torch.uint32).view(torch.int32)

    def __call__(self, name: str, linear: nn.Linear) -> foreign.Layer:
        (n, k), numbers = linear.weight.shape, self.numbers
        bits = int(numbers["dtype"][-1])
        low = 0 if numbers["dtype"][0] == "u" else -(1 << bits - 1)
        q = torch.randint(low, low + (1 << bits), (n, k))
        size, rows = numbers["group_size"] or k, 1 if numbers["qscheme"] == "per_tensor" else n
        scale = (torch.rand(rows, k // size) + 0.5) * 0.4 / (1 << bits)
        middle = low + (1 << bits - 1)
        spread = 0 if numbers["symmetric"] else 2
        zero = torch.randint(middle - spread, middle + spread + 1, scale.shape)
        wide = [each.repeat_interleave(size, 1) for each in (zero, scale)]
        weight = (q - wide[0]).float() * wide[1]
        if numbers["qscheme"] == "per_group":
            q, scale, zero = (each.t().contiguous() for each in (q, scale, zero))
        else:
            scale, zero = (each[0, 0] if rows == 1 else each[:, 0].contiguous() for each in (scale, zero))
        parts = {"weight": self.words(q), "weight_scale": scale}
        parts |= {"weight_zero_point": self.words(zero)} if self.stated else {}
        if self.inputs:
            parts |= {"input_scale": torch.tensor(0.05), "input_zero_point": torch.tensor(0, dtype=torch.int8)}
        return parts, weight


STATIC = tensor("int8")
INT_KINDS: dict[str, tuple[Integers, dict[str, Any] | None, type[nn.Module]]] = {
    "int8 per channel": (Integers(channels("int8")), None, WeightOnlyLinear),
    "int8 per channel without zeros": (Integers(channels("int8"), stated=False), None, WeightOnlyLinear),
    "int8 per channel and token": (Integers(channels("int8")), INT8_TOKEN, Int8Linear),
    "int8 per tensor, static": (Integers(tensor("int8"), inputs=True), STATIC, Int8Linear),
    "uint8 per tensor": (Integers(tensor("uint8", False)), None, WeightOnlyLinear),
    "int8 in groups": (Integers(groups("int8", symmetric=True)), None, WeightOnlyLinear),
    "uint4 in groups": (Integers(groups("uint4")), None, WeightOnlyLinear),
    "uint4 in order": (Integers(groups("uint4"), order="order"), None, WeightOnlyLinear),
    "int4 in groups": (Integers(groups("int4", symmetric=True)), None, WeightOnlyLinear),
    "int4 with zeros": (Integers(groups("int4")), None, WeightOnlyLinear),
    "int4 per channel": (Integers(channels("int4")), None, WeightOnlyLinear),
    "int4 and int8": (Integers(groups("int4", symmetric=True)), INT8_TOKEN, W4A8Linear),
    "int4 and fp8": (Integers(groups("int4", symmetric=True)), TOKENS, W4A8Linear),
}


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("name", INT_KINDS)
def test_integers(seed: int, tmp_path: Path, name: str) -> None:
    pack, inputs, module = INT_KINDS[name]
    layer = LAYER | {"weight": pack.numbers, "input_tensors": inputs}
    export = {"export": CONFIG["export"] | {"pack_method": "order" if "in order" in name else "reorder"}}
    config = CONFIG | export | {"exclude": ["lm_head"], "global_quant_config": layer}
    exact = foreign.write_as(tmp_path / "in", foreign.llama(), pack, config, shards=1)
    model, _ = models.load(Checkpoint(tmp_path / "in"))
    assert type(model.get_submodule(UP)) is module
    for parameter, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(values, exact.get_parameter(parameter), rtol=2**-22, atol=0)
    found, wanted = logits(model), logits(exact)
    if "static" in name:
        layer = model.get_submodule(UP)
        assert float(layer.input_scale) == pytest.approx(0.05) and int(layer.input_zero_point) == 0
    else:
        assert float((found - wanted).norm() / wanted.norm()) < (1e-5 if inputs is None else 0.15)
    assert torch.equal(logits(opened(tmp_path / "in")), found)
    result = run("convert", tmp_path / "in", tmp_path / "epiloq", "--format", "epiloq")
    assert result.exit_code == 0, result.output
    assert same(weights(tmp_path / "epiloq"), weights(tmp_path / "in"))


@pytest.mark.parametrize("change", ["missing", "legacy", "dtype", "words"])
def test_integers_of_wrong_tensors(seed: int, tmp_path: Path, change: str) -> None:
    inner = Integers(groups("uint4"))

    def pack(name: str, linear: nn.Linear) -> foreign.Layer:
        parts, weight = inner(name, linear)
        if change == "missing":
            del parts["weight_zero_point"]
        elif change == "legacy":
            parts["weight_scale"] = parts["weight_scale"].t().contiguous()
        elif change == "dtype":
            parts["weight"] = parts["weight"].long()
        else:
            parts["weight"] = parts["weight"][:, 1:].contiguous()
        return parts, weight

    layer = LAYER | {"weight": inner.numbers, "input_tensors": None}
    config = CONFIG | {"exclude": ["lm_head"], "global_quant_config": layer}
    foreign.write_as(tmp_path / "in", foreign.llama(), pack, config, shards=1)
    message = {"missing": "weight_zero_point: expected", "legacy": "weight_scale: expected"}.get(change, "weight: exp")
    with pytest.raises(FormatError, match=message):
        models.load(Checkpoint(tmp_path / "in"))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "int3": ({"global_quant_config": {"weight": NUMBERS | {"dtype": "int3"}}}, "weight: dtype: expected fp4"),
    "int4 per tensor": ({"global_quant_config": {"weight": tensor("int4")}}, "expected int4 per_channel, per_group"),
    "int4 at run time": (
        {"global_quant_config": {"weight": channels("int4") | {"is_dynamic": True}}},
        "with scales in the files",
    ),
    "columns": ({"global_quant_config": {"weight": channels("int8") | {"ch_axis": 1}}}, "ch_axis: expected 0"),
    "no symmetry": (
        {"global_quant_config": {"weight": channels("int8") | {"symmetric": None}}},
        "symmetric: expected True or False",
    ),
    "real zeros": (
        {"global_quant_config": {"weight": groups("uint4") | {"zero_point_type": "float32"}}},
        "zero_point_type: expected int32",
    ),
    "symmetric uint4": (
        {"global_quant_config": {"weight": groups("uint4", symmetric=True)}},
        "symmetric: expected false with uint4",
    ),
    "no groups": (
        {"global_quant_config": {"weight": groups("uint4") | {"group_size": None}}},
        "group_size: expected at least 1",
    ),
    "uint8 tokens": (
        {"global_quant_config": {"weight": channels("int8"), "input_tensors": tensor("uint8", False)}},
        "input_tensors: dtype: expected int8",
    ),
    "tensors at run time": (
        {"global_quant_config": {"weight": channels("int8"), "input_tensors": tensor("int8") | {"is_dynamic": True}}},
        "global_quant_config: input_activations: with integer weights expected none",
    ),
    "other groups": ({"global_quant_config": {"weight": NUMBERS | {"group_size": 16}}}, "group_size: expected 32"),
    "two stages": ({"global_quant_config": {"weight": [NUMBERS, NUMBERS]}}, "weight: expected an object"),
    "static inputs": ({"global_quant_config": LAYER | {"input_tensors": NUMBERS}}, "is_dynamic: expected True"),
    "outputs": ({"global_quant_config": LAYER | {"output_tensors": NUMBERS}}, "output_tensors: expected none"),
    "a cache": (
        {"kv_cache_quant_config": {"*k_proj": LAYER}},
        r"kv_cache_quant_config: \*k_proj: weight: expected none",
    ),
    "fp8 outputs": ({"global_quant_config": LAYER | {"output_tensors": FP8}}, "output_tensors: expected none"),
    "fp8 in blocks": (
        {"global_quant_config": {"weight": FP8 | {"qscheme": "per_group"}}},
        "qscheme: expected per_tensor",
    ),
    "fp8 without scales": (
        {"global_quant_config": {"weight": FP8 | {"is_dynamic": True}}},
        "is_dynamic: expected scales",
    ),
    "static tokens": (
        {"global_quant_config": {"weight": FP8, "input_tensors": FP8 | {"qscheme": "per_channel"}}},
        "is_dynamic: expected true with per_channel",
    ),
    "rotations": ({"algo_config": [{"name": "rotation"}]}, "algo_config: name: expected one of smooth, .*'rotation'"),
    "another order": ({"export": {"pack_method": "other"}}, "pack_method: expected reorder or order, got 'other'"),
    "an entry": ({"softmax": True}, "softmax: epiloq does not know"),
    "no numbers": ({"global_quant_config": {}}, "leaves model.layers.0.mlp.down_proj in floating point"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused_by_name(what: str, seed: int, tmp_path: Path) -> None:
    change, message = WRONG[what]
    foreign.write_as(tmp_path / "in", foreign.llama(), mxfp4, CONFIG | change, shards=1)
    with pytest.raises(FormatError, match=message):
        models.load(Checkpoint(tmp_path / "in"))
