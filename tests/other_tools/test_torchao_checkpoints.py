"""Directories of torchao, which transformers saves as safetensors: metadata of the files describes each layer."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from epiloq.formats import convert
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Fp8WeightOnlyLinear, Int8Linear, W4A8Linear, WeightOnlyLinear
from opened_models import logits, opened
from rounded_models import same, weights

# Other tests want transformers as it is.
integration.unregister()

CONFIG = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"set_inductor_config": True}}},
    "modules_to_not_convert": None,
    "include_input_output_embeddings": False,
    "untie_embedding_weights": False,
}
ROW = {"_type": "PerRow", "_data": {"dim": -1}}
INT8_TOKENS = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"granularity": ROW, "reduce_range": False}}


def dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def fp8_inputs(granularity: str, **more: Any) -> dict[str, Any]:
    data = {
        "float8_dtype": dtype("float8_e4m3fn"),
        "granularity": {"_type": granularity, "_data": {}},
        "mm_config": None,
    }
    return {"_type": "QuantizeTensorToFloat8Kwargs", "_data": data | {"hp_value_lb": None, "hp_value_ub": None} | more}


class Kind:
    """Random tensors of a class of torchao: integers of `bits` or FP8, with scales for `block` (-1: all)."""

    def __init__(self, name: str, block: tuple[int, int], bits: int = 0, zeros: bool = False, **data: Any) -> None:
        self.name, self.block, self.bits, self.zeros, self.data = name, block, bits, zeros, data
        self.described: dict[str, str] = {}

    def __call__(self, layer: str, linear: nn.Linear) -> foreign.Layer:
        shape = linear.out_features, linear.in_features
        block = [whole if size == -1 else size for size, whole in zip(self.block, shape, strict=True)]
        counts = [-(-whole // size) for whole, size in zip(shape, block, strict=True)]
        scale = torch.rand(*counts) * 0.05 + 0.05

        def spread(values: Tensor) -> Tensor:
            wide = values.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            return wide[: shape[0], : shape[1]].float()

        tensors = {"_weight_qdata": torch.randn(shape).to(torch.float8_e4m3fn), "_weight_scale": scale}
        shift = torch.zeros(counts, dtype=torch.int8)
        if self.bits:
            top = 1 << (self.bits - 1)
            shift = torch.randint(-2, 3, counts, dtype=torch.int8) if self.zeros else shift
            scale /= top
            tensors["_weight_qdata"] = torch.randint(-top, top, shape, dtype=torch.int8)
            tensors["_weight_zero_point"] = shift
        data = {"block_size": block, "dtype": dtype("float32"), **self.data}
        self.described[f"{layer}.weight"] = json.dumps({"_type": self.name, "_data": data})
        return tensors, (tensors["_weight_qdata"].float() - spread(shift)) * spread(scale)


class Halves(Kind):
    """Int4Tensor: two columns a byte, with scales and real offsets by group first, in bfloat16."""

    def __init__(self, group: int, activation: str | None, zeros: bool) -> None:
        super().__init__("Int4Tensor", (1, group), 4, zeros, activation_dtype=activation and dtype(activation))

    def __call__(self, layer: str, linear: nn.Linear) -> foreign.Layer:
        n, k = linear.out_features, linear.in_features
        q = torch.randint(-8, 8, (n, k), dtype=torch.int8)
        scale = (torch.rand(k // self.block[1], n) * 0.01 + 0.01).bfloat16()
        offset = (torch.randn_like(scale) * 0.02).bfloat16() if self.zeros else torch.zeros_like(scale)
        data = {**self.data, "block_size": list(self.block), "shape": [n, k]}
        self.described[f"{layer}.weight"] = json.dumps({"_type": self.name, "_data": data})
        values = [each.float().t().repeat_interleave(self.block[1], 1) for each in (scale, offset)]
        parts = {"qdata": q[:, 1::2] << 4 | q[:, ::2] & 15, "scale": scale, "zero_point": offset}
        return {f"_weight_{name}": part for name, part in parts.items()}, q.float() * values[0] + values[1]


INTX = "IntxUnpackedToInt8Tensor"
KINDS: dict[str, tuple[Kind, type[nn.Module]]] = {
    "int8": (Kind("Int8Tensor", (1, -1), 8, act_quant_kwargs=None, reduce_range=False), WeightOnlyLinear),
    "int8 in groups": (Kind("Int8Tensor", (1, 32), 8, act_quant_kwargs=None), WeightOnlyLinear),
    "int8 with int8": (Kind("Int8Tensor", (1, -1), 8, act_quant_kwargs=INT8_TOKENS), Int8Linear),
    "int8 per tensor with int8": (Kind("Int8Tensor", (-1, -1), 8, act_quant_kwargs=INT8_TOKENS), Int8Linear),
    "int4": (Kind(INTX, (1, 32), 4, target_dtype=dtype("int4"), activation_quantization=None), WeightOnlyLinear),
    "int4 with zero points": (Kind(INTX, (1, 32), 4, zeros=True, target_dtype=dtype("int4")), WeightOnlyLinear),
    "int5": (Kind(INTX, (1, 32), 5, target_dtype=dtype("int5")), WeightOnlyLinear),
    "int8 with asymmetric int8": (
        Kind(INTX, (1, -1), 8, target_dtype=dtype("int8"), activation_quantization="int8_asym_per_token"),
        Int8Linear,
    ),
    "fp8": (Kind("Float8Tensor", (1, -1), act_quant_kwargs=None, mm_config=None), Fp8WeightOnlyLinear),
    "fp8 per tensor": (Kind("Float8Tensor", (-1, -1), act_quant_kwargs=None), Fp8WeightOnlyLinear),
    "fp8 with fp8": (Kind("Float8Tensor", (1, -1), act_quant_kwargs=fp8_inputs("PerRow")), Fp8Linear),
    "fp8 per tensor with fp8": (Kind("Float8Tensor", (-1, -1), act_quant_kwargs=fp8_inputs("PerTensor")), Fp8Linear),
    "fp8 in blocks": (Kind("Float8Tensor", (128, 128), act_quant_kwargs=fp8_inputs("PerBlock")), Fp8BlockLinear),
}


def make(folder: Path, kind: Kind, left: str = "") -> Any:
    """Of which layers named `left` stay in floating point."""
    config = CONFIG | ({"modules_to_not_convert": [left]} if left else {})
    packed = lambda name, linear: None if left and left in name else kind(name, linear)  # noqa: E731
    model = foreign.write_as(folder, foreign.llama(), packed, config, shards=1)
    file = folder / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt", **kind.described})
    return model


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("name", KINDS)
def test_opened_everywhere(seed: int, tmp_path: Path, name: str) -> None:
    kind, module = KINDS[name]
    exact = make(tmp_path / "in", kind, left="o_proj" if name == "int4" else "")
    model = models.load(Checkpoint(tmp_path / "in"))[0]
    assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is module
    for layer, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(values, exact.get_parameter(layer), rtol=1e-6, atol=0)
    found, wanted = logits(model), logits(exact)
    quantises = module in (Int8Linear, Fp8Linear, Fp8BlockLinear)
    assert float((found - wanted).norm() / wanted.norm()) < (0.15 if quantises else 1e-5)
    assert torch.equal(logits(opened(tmp_path / "in")), found)
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "epiloq", "epiloq"))
    assert same(weights(tmp_path / "epiloq"), weights(tmp_path / "in"))


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("listed", ["k_proj", "model.layers.0"])
def test_layers_that_are_listed_but_quantised(seed: int, tmp_path: Path, listed: str) -> None:
    """transformers looks for "k_proj" at the end of "….k_proj.weight", quantises the layer, and lists the name; it
    opens what metadata describe."""
    kind, module = KINDS["int8"]
    make(tmp_path / "in", kind)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [listed]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    found = models.load(Checkpoint(tmp_path / "in"))[0]
    assert type(found.get_submodule("model.layers.0.self_attn.k_proj")) is module
    assert torch.equal(logits(opened(tmp_path / "in")), logits(found))


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize(
    ("activation", "zeros", "module"),
    [("bfloat16", True, WeightOnlyLinear), (None, False, WeightOnlyLinear), ("float8_e4m3fn", False, W4A8Linear)],
)
def test_two_integers_a_byte(
    seed: int, tmp_path: Path, activation: str | None, zeros: bool, module: type[nn.Module]
) -> None:
    exact = make(tmp_path / "in", Halves(32, activation, zeros))
    model = models.load(Checkpoint(tmp_path / "in"))[0]
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert type(layer) is module and (module is W4A8Linear or (layer.zeros == "offset") == zeros)
    for name, values in weights(tmp_path / "in").items():
        torch.testing.assert_close(values, exact.get_parameter(name), rtol=1e-6, atol=1e-7)
    found, wanted = logits(model), logits(exact)
    assert float((found - wanted).norm() / wanted.norm()) < (0.15 if module is W4A8Linear else 1e-4)
    assert torch.equal(logits(opened(tmp_path / "in")), found)
    convert.perform(convert.prepare(tmp_path / "in", tmp_path / "epiloq", "epiloq"))
    assert same(weights(tmp_path / "epiloq"), weights(tmp_path / "in"))


def test_fp8_activations_beside_offsets(seed: int, tmp_path: Path) -> None:
    exact = make(tmp_path / "in", Halves(32, "float8_e4m3fn", True))
    with pytest.warns(UserWarning, match="activations stay in floating point, not in FP8 per token"):
        model = models.load(Checkpoint(tmp_path / "in"))[0]
    torch.testing.assert_close(logits(model), logits(exact), rtol=1e-4, atol=1e-4)


def test_activations_that_no_layer_quantises(seed: int, tmp_path: Path) -> None:
    """ExecuTorch's int8 with zero points beside 4-bit groups: the weights as they are, with a warning."""
    how = {"target_dtype": dtype("int4"), "activation_quantization": "int8_asym_per_token"}
    exact = make(tmp_path / "in", Kind(INTX, (1, 32), 4, **how))
    with pytest.warns(UserWarning, match="activations stay in floating point, not in int8 per token with zero"):
        model = models.load(Checkpoint(tmp_path / "in"))[0]
    torch.testing.assert_close(logits(model), logits(exact), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind("Int4TilePackedTo4dTensor", (1, 32), 4), "does not read Int4TilePackedTo4dTensor .*install torchao"),
        (Kind("NVFP4Tensor", (1, 16), 4), r"does not read NVFP4Tensor \(NVFP4\): install torchao"),
        (Kind("Int3Tensor", (1, 16), 4), r"_type: expected one of Int8Tensor, .*got 'Int3Tensor'"),
        (Halves(32, "float16", True), "activation_dtype: expected bfloat16 or float8_e4m3fn, got 'float16'"),
        (Kind("Float8Tensor", (1, -1), rotation="x"), "rotation: epiloq does not know what it does"),
        (
            Kind("Float8Tensor", (1, -1), act_quant_kwargs=fp8_inputs("PerRow", hp_value_lb=1.0)),
            "hp_value_lb: expected",
        ),
        (Kind("Float8Tensor", (1, -1), act_quant_kwargs=fp8_inputs("PerAxis")), "expected PerRow"),
        (Kind("Int8Tensor", (64, 32), 8), "no kernel supports integers in"),
        (Kind(INTX, (1, 32), 4, target_dtype=dtype("uint4")), "target_dtype: expected int1 to int8, got 'uint4'"),
        (Kind(INTX, (1, 32), 4), "target_dtype: expected int1 to int8, got None"),
    ],
)
def test_refused_by_name(seed: int, tmp_path: Path, kind: Kind, message: str) -> None:
    make(tmp_path / "in", kind)
    for read in (opened, models.from_directory):
        with pytest.raises(ValueError, match=rf"model\.safetensors: .*_proj\._weight_qdata: torchao: .*{message}"):
            read(tmp_path / "in")


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"model.layers.0.self_attn.q_proj.weight": "[" * 9}])
def test_without_the_metadata(seed: int, tmp_path: Path, metadata: dict[str, str]) -> None:
    make(tmp_path / "in", KINDS["int8"][0])
    file = tmp_path / "in" / "model.safetensors"
    save_file(load_file(file), file, metadata)
    for read in (opened, models.from_directory):
        with pytest.raises(
            ValueError, match=r"_weight_qdata: torchao: metadata: (_type: expected one of|expected JSON)"
        ):
            read(tmp_path / "in")


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.parametrize("renamed", [{"_weight_qdata": "weight", "_weight_scale": "scale"}, {"_weight_qdata": "q"}])
def test_tensors_of_other_names(seed: int, tmp_path: Path, renamed: dict[str, str]) -> None:
    """As of older versions, or saved by others: named instead of a KeyError."""
    make(tmp_path / "in", KINDS["int8"][0])
    file, found = tmp_path / "in" / "model.safetensors", dict[str, Tensor]()
    for name, tensor in load_file(file).items():
        layer, _, part = name.rpartition(".")
        found[f"{layer}.{renamed.get(part, part)}"] = tensor
    save_file(found, file, {"format": "pt"})
    for read in (opened, models.from_directory):
        with pytest.raises(ValueError, match=r"_proj(\.\w+)?: .*(found none|not a tensor of this model)"):
            read(tmp_path / "in")


@pytest.mark.usefixtures("epiloq_in_transformers")
def test_pickles_are_not_opened(seed: int, tmp_path: Path) -> None:
    """Which torchao wrote before it had safetensors."""
    make(tmp_path / "in", KINDS["int8"][0])
    (tmp_path / "in" / "model.safetensors").rename(tmp_path / "in" / "pytorch_model.bin")
    for read in (opened, models.from_directory):
        with pytest.raises(ValueError, match=r"pytorch_model.bin: pickles are never opened: save .* as safetensors"):
            read(tmp_path / "in")


def test_torchao_still_quantises_what_its_own_class_describes(epiloq_in_transformers: None) -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    assert AUTO_QUANTIZER_MAPPING["torchao"] is not integration.EpiloqQuantizer
    assert AUTO_QUANTIZER_MAPPING["torchao by epiloq"] is integration.EpiloqQuantizer
    given = type("TorchAoConfig", (), {"quant_method": "torchao"})()
    with pytest.raises(Exception) as caught:  # transformers' own class is asked, which needs the package
        transformers.quantizers.auto.AutoHfQuantizer.merge_quantization_configs(CONFIG, given)
    assert not isinstance(caught.value, ValueError) or "epiloq" not in str(caught.value)


def quant_type(name: str, **data: Any) -> dict[str, Any]:
    return {"_type": name, "_version": 2, "_data": data}


def packing(name: str) -> dict[str, str]:
    return {"_type": "Int4PackingFormat", "_data": name}


PLAIN = quant_type("Int4WeightOnlyConfig", group_size=32, int4_packing_format=packing("PLAIN"))
TILED = quant_type("Int4WeightOnlyConfig", group_size=32, int4_packing_format=packing("TILE_PACKED_TO_4D"))


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (CONFIG["quant_type"]["default"], True),
        (PLAIN, True),
        (TILED, False),
        (quant_type("NVFP4WeightOnlyConfig"), False),
        (quant_type("Float8DynamicActivationInt4WeightConfig", int4_packing_format="preshuffled"), False),
        (quant_type("FqnToConfig", fqn_to_config={"re:a": PLAIN, "_default": None}), True),
        (quant_type("FqnToConfig", fqn_to_config={"re:a": PLAIN, "b": TILED}), False),
        ("int4_weight_only", False),
        ({"_type": [], "_data": {}}, False),
    ],
)
def test_what_epiloq_does_not_read_is_left_to_torchao(
    epiloq_in_transformers: None, monkeypatch: pytest.MonkeyPatch, kind: Any, read: bool, installed: bool
) -> None:
    """If it is installed; otherwise epiloq says what the files hold."""
    found = find_spec
    monkeypatch.setattr(
        integration, "find_spec", lambda name: (object() if installed else None) if name == "torchao" else found(name)
    )
    merge = transformers.quantizers.auto.AutoHfQuantizer.merge_quantization_configs
    given = {**CONFIG, "quant_type": {"default": kind}}
    if read or not installed:
        assert isinstance(merge(given, None), integration.EpiloqConfig)
        return
    try:  # transformers' own class is asked, which needs the package
        assert not isinstance(merge(given, None), integration.EpiloqConfig)
    except Exception as error:
        assert "epiloq" not in str(error)
