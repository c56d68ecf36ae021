"""Checkpoints of mixtures of experts in every format, and vLLM's layers made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

import epiloq.integrations.vllm as integration
from epiloq import nn as modules
from epiloq.formats.layouts import awq, gptq
from epiloq.integrations.vllm import experts as plugin
from vllm_checkpoints import arguments, compressed_tensors, words_of_compressed_tensors
from vllm_kernel_lists import backends_of_gpus

Layers = list[dict[str, Any]]
HIDDEN, INTERMEDIATE, COUNT = 256, 256, 8
TOKEN = arguments(8, "int", "token", dynamic=True)
FLOAT_TOKEN = arguments(8, "float", "token", dynamic=True)


@dataclass(frozen=True)
class Format:
    """How a checkpoint quantises a matrix, and the engine's configuration of it.

    kind
        The kind of layers, as in ``EPILOQ_ENGINE_LAYERS``.
    error
        Bound of the relative error that rounded activations cause.
    """

    kind: str
    config: Callable[[], Any]
    convert: Callable[[nn.Linear], Any]
    tensors: Callable[[Any], dict[str, Tensor]]
    error: float


def words(bits: int, group_size: int, zeros: str) -> Format:
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = arguments(bits, "int", **strategy) | {"symmetric": zeros == "none"}
    return Format(
        f"w{bits}a16-experts",
        lambda: compressed_tensors(weights, None, "pack-quantized"),
        lambda layer: modules.WeightOnlyLinear.from_linear(layer, bits=bits, group_size=group_size, zeros=zeros),
        words_of_compressed_tensors,
        2**-7,
    )


def by_group(zeros: str, bits: int = 4) -> Callable[[nn.Linear], Any]:
    return lambda layer: modules.WeightOnlyLinear.from_linear(layer, bits=bits, group_size=32, zeros=zeros)


def with_columns(module: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = module.file_state()
    return state | {"weight_scale": state["weight_scale"].view(-1, 1)}


def int8() -> Any:
    return compressed_tensors(arguments(8, "int", "channel"), TOKEN, "int-quantized")


def float8(strategy: str, inputs: str) -> Callable[[], Any]:
    rounded = arguments(8, "float", inputs, dynamic=True)
    return lambda: compressed_tensors(arguments(8, "float", strategy), rounded, "float-quantized")


def float8_blocks() -> Any:
    weights = arguments(8, "float", "block", block_structure=[128, 128])
    return compressed_tensors(weights, arguments(8, "float", "group", dynamic=True, group_size=128), "float-quantized")


def per_tensor(layer: nn.Linear) -> Any:
    return modules.Fp8Linear.from_linear(layer, weight="tensor")


def fp4(form: str, inputs: dict[str, Any] | None = None) -> Format:
    group = {"mxfp4": {"strategy": "group", "group_size": 32}, "nvfp4": {"strategy": "tensor_group", "group_size": 16}}
    scale = {"mxfp4": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}[form]
    weights = arguments(4, "float", **group[form]) | {"scale_dtype": scale}

    def tensors(module: Any) -> dict[str, Tensor]:
        state = module.file_state()
        found = {"weight_packed": state["weight"], "weight_scale": state["weight_scale"]}
        return found | ({"weight_global_scale": state["weight_global_scale"]} if form == "nvfp4" else {})

    return Format(
        f"{form}-experts",
        lambda: compressed_tensors(weights, inputs, f"{form}-pack-quantized"),
        lambda layer: modules.Fp4Linear.from_linear(layer, format=form),
        tensors,
        2**-6,
    )


FORMATS = {
    "words of 4 bits": words(4, 32, "none"),
    "words of 4 bits with zero points": words(4, 128, "zero"),
    "words of 4 bits per channel": words(4, -1, "none"),
    "words of 8 bits": words(8, 128, "none"),
    "GPTQ": Format(
        "w4a16-experts",
        lambda: AutoGPTQConfig(4, 32, False, True, False, {}, {}),
        by_group("none"),
        lambda module: gptq.from_packed(module.packed),
        2**-7,
    ),
    "GPTQ of 8 bits": Format(
        "w8a16-experts",
        lambda: AutoGPTQConfig(8, 32, False, True, False, {}, {}),
        by_group("none", 8),
        lambda module: gptq.from_packed(module.packed),
        2**-7,
    ),
    "AWQ": Format(
        "w4a16-experts",
        lambda: AutoAWQConfig(4, 32, True, False, [], {}),
        by_group("zero"),
        lambda module: awq.from_packed(module.packed),
        2**-7,
    ),
    "FP8 in blocks": Format(
        "fp8-block-experts",
        lambda: Fp8Config(True, "dynamic", weight_block_size=[128, 128]),
        modules.Fp8BlockLinear.from_linear,
        lambda module: module.file_state(),
        0.08,
    ),
    "FP8 in blocks of compressed-tensors": Format(
        "fp8-block-experts",
        float8_blocks,
        modules.Fp8BlockLinear.from_linear,
        lambda module: {"weight": module.file_state()["weight"], "weight_scale": module.weight_scale_inv},
        0.08,
    ),
    "FP8 per channel": Format(
        "fp8-experts", float8("channel", "token"), modules.Fp8Linear.from_linear, with_columns, 0.08
    ),
    "FP8 per tensor": Format(
        "fp8-experts", lambda: Fp8Config(True, "dynamic"), per_tensor, lambda module: module.file_state(), 0.08
    ),
    "FP8 per tensor of compressed-tensors": Format(
        "fp8-experts", float8("tensor", "tensor"), per_tensor, lambda module: module.file_state(), 0.08
    ),
    "MXFP4": fp4("mxfp4"),
    "NVFP4": fp4("nvfp4"),
    "NVFP4 with activations": fp4(
        "nvfp4", arguments(4, "float", "tensor_group", dynamic=True, group_size=16) | {"dynamic": "local"}
    ),
    "int8": Format("int8-experts", int8, modules.Int8Linear.from_linear, with_columns, 0.03),
}


def quantised(form: Format, count: int = COUNT, intermediate: int = INTERMEDIATE) -> Layers:
    found = []
    for _ in range(count):
        sizes = {"gate_proj": (HIDDEN, intermediate), "up_proj": (HIDDEN, intermediate)}
        sizes["down_proj"] = (intermediate, HIDDEN)
        layers = {}
        for name, (k, n) in sizes.items():
            layer = nn.Linear(k, n, bias=False, dtype=vllm_on_cpu.DTYPE)
            nn.init.normal_(layer.weight, std=k**-0.5)
            layers[name] = form.convert(layer)
        found.append(layers)
    return found


def made(form: Format, layers: Layers, top_k: int = 2, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    """The engine's layer with a checkpoint's tensors, and its configuration."""
    intermediate = layers[0]["gate_proj"].out_features
    expert_parallel = options.pop("expert_parallel", False)
    with vllm_on_cpu.engine(rank, ranks, expert_parallel=expert_parallel) as config:
        layer = vllm_on_cpu.experts(form.config(), len(layers), top_k, HIDDEN, intermediate, **options)
        assert isinstance(layer.routed_experts.quant_method, plugin.EpiloqExperts)
        for expert, each in enumerate(layers):
            for name, module in each.items():
                tensors = form.tensors(module).items()
                found = set(layer.load_weights((f"{expert}.{name}.{part}", tensor) for part, tensor in tensors))
                assert len(found) == len(tensors) or layer.expert_map is not None
        vllm_on_cpu.settle(layer.routed_experts)
    return layer, config


def inputs(tokens: int, count: int = COUNT, uneven: bool = False) -> tuple[Tensor, Tensor]:
    logits = torch.randn(tokens, count)
    if uneven:  # nearly all tokens go to the first two experts, and none to the last
        logits += torch.tensor([9.0, 8.0, *[0.0] * (count - 3), -30.0])
    return torch.randn(tokens, HIDDEN, dtype=vllm_on_cpu.DTYPE), logits


def take_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register epiloq (twice, as an engine's processes may) for every kind of layers."""
    integration.register()
    integration.register()
    monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", "all")
    backends_of_gpus(monkeypatch)
