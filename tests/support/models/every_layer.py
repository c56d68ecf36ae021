"""A small layer of every class in epiloq.nn, of sizes that kernels take as they are and of sizes that they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from epiloq import nn as quantised
from epiloq.nn.experts.expert_linears import ExpertLinears, Projections

Make = Callable[[int, int], nn.Module]
_CONV = {"input_scale": 0.02, "input_zero_point": 3, "output": (0.04, -5)}


def _linear(k: int, n: int) -> nn.Linear:
    return nn.Linear(k, n)


def _experts(kind: Any, **options: Any) -> Make:
    def make(k: int, n: int) -> nn.Module:
        def layer(columns: int, rows: int) -> nn.Module:
            found: nn.Module = kind.from_linear(nn.Linear(columns, rows, bias=False), **options)
            return found

        each = [dict(zip(Projections(), (layer(k, n), layer(k, n), layer(n, k)), strict=True)) for _ in range(2)]
        whole = quantised.GatedExperts.from_linears(ExpertLinears(each, nn.SiLU()))
        assert whole is not None
        return whole

    return make


def _of_linear(kind: Any, **options: Any) -> Make:
    return lambda k, n: kind.from_linear(_linear(k, n), **options)  # type: ignore[no-any-return]


def _of_conv(kind: Any, **options: Any) -> Make:
    return lambda k, n: kind.from_conv2d(nn.Conv2d(k, n, 3, padding=1), **options)  # type: ignore[no-any-return]


def _places(k: int, n: int) -> nn.Module:
    layer = quantised.TableLinear(k, n, block_size=16)
    state = layer.state_dict()
    codes = torch.randint(256, state["weight_q"].shape).to(torch.uint8)
    scale = torch.rand(state["weight_scale"].shape) / k
    drawn = {"weight_q": codes, "weight_scale": scale, "weight_table": torch.randn(16), "bias": torch.randn(n)}
    layer.load_state_dict(drawn)
    return layer


def _table(k: int, n: int) -> nn.Module:
    return quantised.Int8Table.from_function(torch.tanh, input=(0.02 * k, 3), output=(0.01, -n))


def _filled(layer: Any) -> nn.Module:
    """A float8 layer with drawn tensors, as files have them."""
    drawn = {
        name: torch.rand(tensor.shape) / 16 if "scale" in name else torch.randn(tensor.shape).to(tensor.dtype)
        for name, tensor in layer.file_state().items()
    }
    layer.load_state_dict(drawn)
    found: nn.Module = layer
    return found


def _scaled(kind: Any, **options: Any) -> Make:
    """A layer that multiplies its input by a drawn vector first."""

    def make(k: int, n: int) -> nn.Module:
        state = kind.from_linear(_linear(k, n), **options).state_dict()
        layer: nn.Module = kind(k, n, **options, scaled_input=True)
        layer.load_state_dict(state | {"pre_quant_scale": torch.rand(k) + 0.5})
        return layer

    return make


LAYERS: dict[str, Make] = {
    "int8": _of_linear(quantised.Int8Linear),
    "int8-azp": _of_linear(quantised.Int8Linear, symmetric=False),
    "int8-static": _of_linear(
        quantised.Int8Linear, activation="static", symmetric=False, input_scale=0.02, input_zero_point=5
    ),
    "fp8": _of_linear(quantised.Fp8Linear, activation="tensor", weight="tensor"),
    "fp8-static": _of_linear(quantised.Fp8Linear, activation="static", input_scale=0.01),
    "fp8-block": _of_linear(quantised.Fp8BlockLinear),
    "fp8-block-by-row": lambda k, n: _filled(quantised.Fp8BlockLinear(k, n, rows=1)),
    "fp8-limit": lambda k, n: _filled(quantised.Fp8Linear(k, n, limit=3.0)),
    "fp8-weight-only": lambda k, n: _filled(quantised.Fp8WeightOnlyLinear(k, n, block=(8, 5))),
    "w8a16-fp8": _of_linear(quantised.Fp8WeightOnlyLinear),
    "w8a8-block": _of_linear(quantised.OnlineQuantLinear, bits=8, group_size=32, symmetric=True),
    "w4a8-block": _of_linear(quantised.OnlineQuantLinear, bits=4, group_size=32, symmetric=False),
    "w4a16": _of_linear(quantised.WeightOnlyLinear, bits=4, group_size=32, zeros="zero"),
    "w8a16": _of_linear(quantised.WeightOnlyLinear, bits=8, group_size=-1),
    "w4a8-fp8": _of_linear(quantised.W4A8Linear, group_size=32, zeros="zero"),
    "w4a8-int8": _of_linear(quantised.W4A8Linear, activation="int8", group_size=-1),
    "nvfp4": _of_linear(quantised.Fp4Linear),
    "mxfp4": _of_linear(quantised.Fp4Linear, format="mxfp4"),
    "w4a8-mxfp4-fp8": _of_linear(quantised.W4A8Fp4Linear),
    "w4a8-nvfp4-int8": _of_linear(quantised.W4A8Fp4Linear, format="nvfp4", activation="int8"),
    "w4a8-mxfp4-fp8-group": _of_linear(quantised.W4A8Fp4Linear, activation="fp8-group"),
    "w4a8-nvfp4-fp8-static": _of_linear(
        quantised.W4A8Fp4Linear, format="nvfp4", activation="fp8-static", input_scale=0.01
    ),
    "w4a16-scaled": _scaled(quantised.WeightOnlyLinear, bits=4, group_size=32, zeros="zero"),
    "nvfp4-scaled": _scaled(quantised.Fp4Linear),
    "table-4": _places,
    "conv-int8": _of_conv(quantised.Int8Conv2d, **_CONV),
    "conv-w4a16": _of_conv(quantised.WeightOnlyConv2d, bits=4, group_size=8, zeros="zero"),
    "experts-int8": _experts(quantised.Int8Linear),
    "experts-fp8": _experts(quantised.Fp8Linear),
    "experts-fp8-block": _experts(quantised.Fp8BlockLinear),
    "experts-w4a16": _experts(quantised.WeightOnlyLinear, group_size=32, zeros="zero"),
    "experts-w4a8-fp8": _experts(quantised.W4A8Linear, group_size=32),
    "experts-w4a8-int8": _experts(quantised.W4A8Linear, activation="int8", group_size=-1, zeros="zero"),
    "experts-w4a8-nvfp4": _experts(quantised.W4A8Fp4Linear, format="nvfp4"),
    "rows-w4a16": lambda k, n: quantised.PackedExperts.from_weight(torch.randn(2, n, k), group_size=32, zeros="zero"),
    "rows-w4a8": lambda k, n: quantised.W4A8Experts.from_weight(torch.randn(2, n, k)),
    "rows-w4a8-mxfp4": lambda k, n: quantised.W4A8Fp4Experts.from_weight(torch.randn(2, n, k)),
    "rows-int8": lambda k, n: quantised.Int8Experts.from_weight(torch.randn(2, n, k)),
    "rows-fp8-block": lambda k, n: quantised.Fp8BlockExperts.from_weight(torch.randn(2, n, k)),
    "table": _table,
    "quantize": lambda k, n: quantised.Int8Quantize((0.01 * k, n)),
}
WEIGHTED = [name for name in LAYERS if name not in ("table", "quantize") and not name.startswith("experts")]
LINEAR = [name for name in WEIGHTED if not name.startswith(("conv", "rows"))]
SIZES = [(32, 16), (37, 21)]


def arguments(name: str, k: int) -> tuple[Any, ...]:
    """Inputs of a layer with `k` input features."""
    if name.startswith("conv"):
        return (torch.randn(2, k, 5, 4),)
    if name.startswith("experts"):
        return torch.randn(6, k), torch.randint(2, (6, 2)), torch.rand(6, 2)
    if name == "table":
        return (torch.randint(-128, 128, (3, 50), dtype=torch.int8),)
    return (torch.randn(6, k),)


def run(name: str, layer: nn.Module, given: tuple[Any, ...]) -> Tensor:
    """A layer's output."""
    offs = {"offs": torch.tensor([2, 6], dtype=torch.int32)} if name.startswith("rows") else {}
    y: Tensor = layer(*given, **offs)
    return y


FROM_LINEAR: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8": quantised.Int8Linear.from_linear,
    "int8-azp": lambda linear: quantised.Int8Linear.from_linear(linear, symmetric=False),
    "int8-static": lambda linear: quantised.Int8Linear.from_linear(linear, activation="static", input_scale=0.02),
    "int8-static-azp": lambda linear: quantised.Int8Linear.from_linear(
        linear, activation="static", symmetric=False, input_scale=0.02, input_zero_point=-7
    ),
    "fp8-token": quantised.Fp8Linear.from_linear,
    "fp8-tensor": lambda linear: quantised.Fp8Linear.from_linear(linear, activation="tensor", weight="tensor"),
    "fp8-static": lambda linear: quantised.Fp8Linear.from_linear(linear, activation="static", input_scale=0.01),
    "fp8-block": quantised.Fp8BlockLinear.from_linear,
    "w4a16": lambda linear: quantised.WeightOnlyLinear.from_linear(linear, group_size=32),
    "w8a16": lambda linear: quantised.WeightOnlyLinear.from_linear(linear, bits=8, group_size=-1),
    "w8a8-block": quantised.OnlineQuantLinear.from_linear,
    "w4a8-block": lambda linear: quantised.OnlineQuantLinear.from_linear(
        linear, bits=4, group_size=32, symmetric=False
    ),
    "w4a8-fp8": lambda linear: quantised.W4A8Linear.from_linear(linear, group_size=32, zeros="zero"),
    "w4a8-int8": lambda linear: quantised.W4A8Linear.from_linear(linear, activation="int8", group_size=-1),
    "nvfp4": quantised.Fp4Linear.from_linear,
    "w4a8-mxfp4-fp8": quantised.W4A8Fp4Linear.from_linear,
    "w4a8-nvfp4-int8": lambda linear: quantised.W4A8Fp4Linear.from_linear(linear, format="nvfp4", activation="int8"),
    "w4a8-mxfp4-fp8-group": lambda linear: quantised.W4A8Fp4Linear.from_linear(linear, activation="fp8-group"),
    "w4a8-nvfp4-fp8-static": lambda linear: quantised.W4A8Fp4Linear.from_linear(
        linear, format="nvfp4", activation="fp8-static", input_scale=0.01
    ),
}
"""Of a float layer; the kinds that have a direct call in eager torch, each with its variants."""
