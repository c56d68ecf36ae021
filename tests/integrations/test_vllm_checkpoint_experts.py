"""Experts of epiloq's own format in vLLM's layers, loaded by its weight loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
from vllm.model_executor.layers.fused_moe.layer import fused_moe_make_expert_params_mapping

import epiloq.integrations.vllm as integration
from engine_schemes import LAYERS_OF_ENGINES, keeps_inputs
from epiloq.formats.layouts.base import FormatError
from epiloq.integrations.vllm import checkpoint_experts
from epiloq.nn.experts.expert_linears import ExpertLinears
from epiloq.nn.experts.gated_experts import GatedExperts
from epiloq.nn.experts.kind import Kind
from mixture_references import error, mixture_in_float64
from vllm_own_format import K, configured, quantised, state


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()
    integration.register()


TOGETHER = [scheme for scheme in LAYERS_OF_ENGINES if Kind.of(quantised(scheme, 32, 256)) is not None]
"""Schemes whose experts are multiplied together."""


def experts_of(scheme: str, count: int, intermediate: int, **others: str) -> list[dict[str, Any]]:
    """Experts by their layers; `others` have other schemes."""
    shapes = {"gate_proj": (intermediate, K), "up_proj": (intermediate, K), "down_proj": (K, intermediate)}
    return [
        {name: quantised(others.get(f"{name}_{expert}", scheme), *shape) for name, shape in shapes.items()}
        for expert in range(count)
    ]


def mixture(
    experts: list[dict[str, Any]], rank: int = 0, ranks: int = 1, expert_parallel: bool = False, **options: Any
) -> Any:
    """The engine's layer with a checkpoint's tensors, and its configuration."""
    names = {
        f"model__layers__0__mlp__experts__{number}__{name}": layer
        for number, layers in enumerate(experts)
        for name, layer in layers.items()
    }
    with vllm_on_cpu.engine(rank, ranks, expert_parallel=expert_parallel) as config:
        size = experts[0]["gate_proj"].out_features
        layer = vllm_on_cpu.experts(configured(**names), len(experts), 2, K, size, **options)
        for number, layers in enumerate(experts):
            for name, module in layers.items():
                tensors = ((f"{number}.{name}.{part}", tensor) for part, tensor in state(module).items())
                loaded = list(layer.load_weights(tensors))
                assert loaded or layer.expert_map is not None
        vllm_on_cpu.settle(layer.routed_experts)
    return layer, config


def routed(tokens: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, K, dtype=vllm_on_cpu.DTYPE), torch.randn(tokens, count)


def chosen(x: Tensor, logits: Tensor) -> Any:
    return vllm_on_cpu.top_k_of_softmax(x, logits, 2, True)


@pytest.mark.parametrize("scheme", TOGETHER)
def test_experts_of_every_scheme(seed: int, scheme: str) -> None:
    experts = experts_of(scheme, 4, 256)
    own = GatedExperts.from_linears(ExpertLinears(experts, nn.SiLU()))
    assert own is not None
    layer, config = mixture(experts)
    assert all(name.startswith("epiloq.") for name, _ in layer.routed_experts.named_parameters())
    for tokens in (0, 1, 7, 100):
        x, logits = routed(tokens, 4)
        weights, ids = chosen(x, logits)
        y = vllm_on_cpu.run_experts(layer, config, x, logits)
        assert torch.equal(y, own(x, ids.long(), weights))
        reference = mixture_in_float64(experts, x, weights, ids)
        assert error(y, reference) < (2**-6 if keeps_inputs(scheme) else 0.1)


def test_experts_loaded_by_their_parameters(seed: int) -> None:
    """As models do whose own functions load them, DeepSeek's for example."""
    experts = experts_of("w4a16-g32", 3, 64)
    layer, config = mixture(experts)
    with vllm_on_cpu.engine():
        other = vllm_on_cpu.experts(layer.routed_experts.quant_config, 3, 2, K, 64)
        parameters = {f"model.layers.0.mlp.experts.{name}": p for name, p in other.named_parameters()}
        mapping = fused_moe_make_expert_params_mapping(other, "gate_proj", "down_proj", "up_proj", 3)
        for parameter_name, weight_name, expert, shard in mapping:
            for part, tensor in state(experts[expert][weight_name.split(".")[2]]).items():
                name = f"model.layers.0.mlp.{parameter_name}{part}"
                parameter = parameters[name]
                assert parameter.weight_loader(
                    parameter, tensor, name, shard_id=shard, expert_id=expert, return_success=True
                )
        vllm_on_cpu.settle(other.routed_experts)
    x, logits = routed(5, 3)
    y = vllm_on_cpu.run_experts(layer, config, x, logits)
    assert torch.equal(other.routed_experts.quant_method.apply(other.routed_experts, x, *chosen(x, logits)), y)


@pytest.mark.parametrize("scheme", TOGETHER)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_of_experts_add_up(seed: int, scheme: str, expert_parallel: bool) -> None:
    experts = experts_of(scheme, 5, 256)
    own = GatedExperts.from_linears(ExpertLinears(experts, nn.SiLU()))
    assert own is not None
    x, logits = routed(7, 5)
    weights, ids = chosen(x, logits)
    expected, total = own(x, ids.long(), weights).double(), torch.zeros(7, K, dtype=torch.float64)
    for rank in range(2):
        layer, config = mixture(experts, rank, 2, expert_parallel)
        assert layer.routed_experts.epiloq.experts == (3 - rank if expert_parallel else 5)
        total += vllm_on_cpu.run_experts(layer, config, x, logits).double()
    # Under tensor parallelism a rank rounds its own part of the inputs of down to 8 bits.
    assert error(total, expected) < (2**-6 if keeps_inputs(scheme) or expert_parallel else 0.05)


def test_experts_that_are_refused_by_name(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "model.layers.0.mlp.experts.0.gate_proj"
    with pytest.raises(ValueError, match=r"experts.1.up_proj: expected all experts .* alike, got Int8Linear"):
        mixture(experts_of("w4a16-g32", 2, 64, up_proj_1="w8a8-int8"))
    for scheme in set(LAYERS_OF_ENGINES) - set(TOGETHER):
        with pytest.raises(ValueError, match=f"{first}: expected a scheme whose experts are multiplied together"):
            mixture(experts_of(scheme, 2, 128))
    experts = experts_of("w4a16-g128", 2, 384)
    with pytest.raises(ValueError, match=r"down_proj: expected whole scale groups in each rank's part"):
        mixture(experts, 0, 2)
    for options, reason in (
        ({"activation": "relu2"}, "expected the activation silu or gelu or gelu_tanh, got relu2"),
        ({"has_bias": True}, "expected no biases"),
    ):
        with pytest.raises(ValueError, match=f"epiloq: {first}: {reason}"):
            mixture(experts, **options)
    monkeypatch.setattr("epiloq.integrations.vllm.expert_offers.capability_here", lambda: 90)
    mixture(experts_of("w2a16-g32", 2, 64))  # the engine records no graphs on a CPU
    monkeypatch.setattr(checkpoint_experts, "get_current_vllm_config_or_none", lambda: None)
    with pytest.raises(ValueError, match=f"{first}: expected experts that CUDA graphs can record, but no kernel"):
        mixture(experts_of("w2a16-g32", 2, 64))
    mixture(experts)


def test_tensors_that_experts_do_not_have(seed: int) -> None:
    layers = experts_of("w8a16", 1, 64)[0]
    names = {f"model__layers__0__mlp__experts__0__{name}": module for name, module in layers.items()}
    with vllm_on_cpu.engine():
        layer = vllm_on_cpu.experts(configured(**names), 1, 1, K, 64)
        for name in ("0.gate_proj.bias", "1.gate_proj.weight_scale", "gate_up_proj"):
            with pytest.raises(FormatError, match=f"mlp.experts.{name}: expected of an expert weight_offset, weight"):
                list(layer.load_weights([(name, torch.ones(1))]))
        with pytest.raises(FormatError, match=r"experts.0.gate_proj: expected tensors, found none"):
            vllm_on_cpu.settle(layer.routed_experts)


def test_experts_in_floating_point_stay_as_they_are(seed: int) -> None:
    config = configured(model__layers__0__mlp__gate=quantised("w8a16", 24))
    with vllm_on_cpu.engine():
        layer = vllm_on_cpu.experts(config, 2, 1, K, 64).routed_experts
    assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    config = configured(model__layers__0__mlp__experts__gate_up_proj=quantised("w8a16", 24))
    with vllm_on_cpu.engine(), pytest.raises(ValueError, match=r"experts.gate_up_proj: expected only quantised linear"):
        vllm_on_cpu.experts(config, 2, 1, K, 64)
