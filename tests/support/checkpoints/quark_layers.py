"""Layers and configurations as AMD's Quark exports them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import foreign_checkpoints as foreign
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from rounded_models import weights

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


FP8 = NUMBERS | {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "group_size": None, "ch_axis": None}
FP8 |= {"scale_format": None, "scale_calculation_mode": None, "observer_cls": "PerTensorMinMaxObserver"}
TOKENS = FP8 | {"qscheme": "per_channel", "is_dynamic": True, "ch_axis": 0}
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


def opened_as(folder: Path, exact: nn.Module, module: type[nn.Module], rtol: float) -> Any:
    """The model of a directory, of whose layers `UP` is of the class `module`; all have the weights of `exact`."""
    model, _ = models.load(Checkpoint(folder))
    assert type(model.get_submodule(UP)) is module
    for parameter, values in weights(folder).items():
        torch.testing.assert_close(values, exact.get_parameter(parameter), rtol=rtol, atol=0)
    return model


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
