"""Directories of AMD's Quark in MXFP4 and FP8, as its exporter lays them out."""

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
import foreign_layers
from command_line import run
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp4Linear, Fp8Linear, Fp8WeightOnlyLinear
from opened_models import logits, opened
from quark_layers import (
    CONFIG,
    DOWN,
    FP8,
    LAYER,
    NOTHING,
    NUMBERS,
    TOKENS,
    UP,
    distance,
    mxfp4,
    opened_as,
)
from rounded_models import same, weights

# Other tests want transformers as it is.
integration.unregister()


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


@pytest.mark.usefixtures("epiloq_in_transformers")
@pytest.mark.filterwarnings("ignore:.*activations stay in floating point")
def test_the_first_rule_counts_also_when_saved(seed: int, tmp_path: Path) -> None:
    """transformers sorts the entries of config.json."""
    own = {"layer_quant_config": {"*up_proj": LAYER, "*mlp*": NOTHING}}

    def pack(name: str, linear: nn.Linear) -> foreign.Layer | None:
        return mxfp4(name, linear) if name.endswith("up_proj") else None

    foreign.write_as(tmp_path / "in", foreign.llama(), pack, CONFIG | own, shards=1)
    theirs = opened(tmp_path / "in")
    theirs.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(opened(tmp_path / "saved")), logits(theirs))


FP8_KINDS: dict[str, tuple[foreign_layers.Pack, dict[str, Any], type[nn.Module]]] = {
    "static": (
        foreign_layers.fp8("weight_scale", -1, -1, shape=("", ()), inputs=("input_scale", ())),
        LAYER | {"weight": FP8, "input_tensors": FP8},
        Fp8Linear,
    ),
    "dynamic": (
        foreign_layers.fp8("weight_scale", -1, -1, shape=("", ())),
        LAYER | {"weight": FP8, "input_tensors": FP8 | {"is_dynamic": True}},
        Fp8Linear,
    ),
    "per channel and token": (
        foreign_layers.fp8("weight_scale", 1, -1, shape=("", (-1,))),
        LAYER | {"weight": FP8 | {"qscheme": "per_channel", "ch_axis": 0}, "input_tensors": TOKENS},
        Fp8Linear,
    ),
    "weights alone": (
        foreign_layers.fp8("weight_scale", -1, -1, shape=("", ())),
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
    found = logits(opened_as(tmp_path / "in", exact, module, rtol=2**-23))
    assert distance(found, logits(exact)) < (0.15 if module is Fp8Linear else 1e-5)
    theirs = opened(tmp_path / "in")
    assert torch.equal(logits(theirs), found)
    theirs.save_pretrained(tmp_path / "saved")
    assert same(*(load_file(tmp_path / name / "model.safetensors") for name in ("in", "saved")))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
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
