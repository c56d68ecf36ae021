"""Models quantised by other packages for comparison: the same decoder layers with their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from epiloq.bench.contract import Unavailable, require
from epiloq.vocabulary import find

Peer = Callable[[nn.Module], nn.Module]


def _torchao(config: str, **options: Any) -> Peer:
    def quantise(model: nn.Module) -> nn.Module:
        package = require("torchao.quantization")
        if not hasattr(package, config):
            raise Unavailable(f"torchao.quantization has no {config}")
        heads = find(model).heads
        made = getattr(package, config)(**options)
        package.quantize_(model, made, filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and name not in heads)
        return model

    return quantise


def _bitsandbytes(kind: str, **options: Any) -> Peer:
    def quantise(model: nn.Module) -> nn.Module:
        layers = require("bitsandbytes").nn
        heads, device = find(model).heads, next(model.parameters()).device
        # The list holds only names, so that each float weight is released before the next is quantised.
        for name in [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in heads]:
            linear: Any = model.get_submodule(name)
            made = getattr(layers, kind)(linear.in_features, linear.out_features, linear.bias is not None, **options)
            state = {key: value.cpu() for key, value in linear.state_dict().items()}
            # bitsandbytes quantises when the weight is moved to a device.
            made.load_state_dict(state)
            model.set_submodule(name, made.to(device).eval())
        return model

    return quantise


def _linear4bit() -> Peer:
    def quantise(model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"quant_type": "nf4", "compute_dtype": next(model.parameters()).dtype}
        return _bitsandbytes("Linear4bit", **options)(model)

    return quantise


PEERS: dict[str, Peer] = {
    "torchao-int8": _torchao("Int8WeightOnlyConfig"),
    "torchao-int4": _torchao("Int4WeightOnlyConfig", group_size=128, int4_packing_format="tile_packed_to_4d"),
    "torchao-int4-plain": _torchao("Int4WeightOnlyConfig", group_size=128),  # needs mslk
    "torchao-fp8": _torchao("Float8DynamicActivationFloat8WeightConfig"),
    "bitsandbytes-nf4": _linear4bit(),
    "bitsandbytes-int8": _bitsandbytes("Linear8bitLt", has_fp16_weights=False, threshold=0.0),
}
"""Functions that quantise a model in place by another package; they raise Unavailable if it is not installed."""
