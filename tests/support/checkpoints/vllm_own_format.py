"""Layers of epiloq's own format, and their configuration, for vLLM."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.quantization import get_quantization_config

import vllm_on_cpu
from engine_schemes import converted
from epiloq.formats import epiloq_modules
from epiloq.integrations.vllm.checkpoint import EpiloqConfig

K = 256
HEADS = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def quantised(scheme: str, n: int, k: int = K) -> Any:
    layer = nn.Linear(k, n, bias=False, dtype=vllm_on_cpu.DTYPE)
    nn.init.normal_(layer.weight, std=k**-0.5)
    return converted(scheme, layer)


def configured(**layers: Any) -> EpiloqConfig:
    """The configuration of a checkpoint with these layers, whose dots are double underscores."""
    described = {
        name.replace("__", "."): (type(layer).__name__, epiloq_modules.KINDS[type(layer).__name__].options_of(layer))
        for name, layer in layers.items()
        if not isinstance(layer, nn.Linear)
    }
    message = json.loads(json.dumps(epiloq_modules.config(epiloq_modules.groups_of(described))))
    method = get_quantization_config("epiloq")
    assert method.override_quantization_method(message | {"quant_method": ""}, None, hf_config=None) == "epiloq"
    config = method.from_config(message)
    config.packed_modules_mapping = HEADS
    return config


def state(layer: Any) -> dict[str, Tensor]:
    return dict(layer.state_dict()) if isinstance(layer, nn.Linear) else layer.file_state()
