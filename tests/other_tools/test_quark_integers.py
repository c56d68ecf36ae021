"""Directories of AMD's Quark in integers, as its exporter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from torch import nn

import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from command_line import run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Int8Linear, W4A8Linear, WeightOnlyLinear
from opened_models import logits, opened
from quark_layers import (
    CONFIG,
    INT8_TOKEN,
    LAYER,
    NUMBERS,
    TOKENS,
    UP,
    Integers,
    channels,
    distance,
    groups,
    mxfp4,
    opened_as,
    tensor,
)
from rounded_models import same, weights

# Other tests want transformers as it is.
integration.unregister()


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
    model = opened_as(tmp_path / "in", exact, module, rtol=2**-22)
    found = logits(model)
    if "static" in name:
        layer = model.get_submodule(UP)
        assert float(layer.input_scale) == pytest.approx(0.05) and int(layer.input_zero_point) == 0
    else:
        assert distance(found, logits(exact)) < (1e-5 if inputs is None else 0.15)
    theirs = opened(tmp_path / "in")
    assert torch.equal(logits(theirs), found)
    with pytest.raises(FormatError, match=r"_proj: quark u?int\d.*: can only be read; epiloq convert writes"):
        theirs.save_pretrained(tmp_path / "saved")
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
}


@pytest.mark.parametrize("what", WRONG)
def test_refused_by_name(what: str, seed: int, tmp_path: Path) -> None:
    change, message = WRONG[what]
    foreign.write_as(tmp_path / "in", foreign.llama(), mxfp4, CONFIG | change, shards=1)
    with pytest.raises(FormatError, match=message):
        models.load(Checkpoint(tmp_path / "in"))
