"""Checkpoints of epiloq's own format in vLLM's own layers, loaded by its weight loaders."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe.layer import fused_moe_make_expert_params_mapping
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

import epiloq.integrations.vllm as integration
from engine_schemes import LAYERS_OF_ENGINES, converted, keeps_inputs, products_of
from epiloq.formats import epiloq_modules
from epiloq.formats.layouts.base import FormatError
from epiloq.integrations.vllm import checkpoint_experts
from epiloq.integrations.vllm.checkpoint import EpiloqConfig, EpiloqLinearMethod
from epiloq.nn.experts.expert_linears import ExpertLinears
from epiloq.nn.experts.gated_experts import GatedExperts
from epiloq.nn.experts.kind import Kind
from mixture_references import error, mixture_in_float64

K, SIZES, MLP = 256, [128, 64], "model.layers.0.mlp"
HEADS = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": ["q_proj", "k_proj", "v_proj"]}


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()
    integration.register()


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


def gate_up(gate: Any, up: Any, rank: int = 0, ranks: int = 1) -> Any:
    """A merged layer of a rank, of two layers of a checkpoint."""
    names = {"model__layers__0__mlp__gate_proj": gate, "model__layers__0__mlp__up_proj": up}
    config = configured(**names)
    with vllm_on_cpu.engine(rank, ranks):
        sizes = [gate.out_features, up.out_features]
        layer = vllm_on_cpu.merged(config, sizes, gate.in_features, f"{MLP}.gate_up_proj")
        assert isinstance(layer.quant_method, EpiloqLinearMethod)
        vllm_on_cpu.load(layer, state(gate), 0)
        vllm_on_cpu.load(layer, state(up), 1)
        vllm_on_cpu.settle(layer)
    return layer


def rows_of_rank(layers: list[Any], x: Tensor, rank: int, ranks: int) -> Tensor:
    return torch.cat([layer(x).chunk(ranks, -1)[rank] for layer in layers], -1)


@pytest.mark.parametrize("scheme", LAYERS_OF_ENGINES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_merged_layers_of_every_scheme(seed: int, scheme: str, ranks: int) -> None:
    gate, up = quantised(scheme, 256), quantised(scheme, 512)
    for rank in range(ranks):
        layer = gate_up(gate, up, rank, ranks)
        assert len(layer.epiloq.products) == products_of(gate, up)
        for shape in ((3, K), (2, 2, K), (0, K)):
            x = torch.randn(shape, dtype=vllm_on_cpu.DTYPE)
            y, _ = layer(x)
            assert torch.equal(y, rows_of_rank([gate, up], x, rank, ranks)), scheme


@pytest.mark.parametrize("scheme", LAYERS_OF_ENGINES)
@pytest.mark.parametrize("k", [256, 416])
def test_row_parallel_layers_add_up(seed: int, scheme: str, k: int) -> None:
    """Of 416 inputs each rank has 208: a group of 128 belongs to both."""
    down = quantised(scheme, 96, k)
    config = configured(model__layers__0__mlp__down_proj=down)
    x = torch.randn(5, k, dtype=vllm_on_cpu.DTYPE)
    total = torch.zeros(5, 96, dtype=torch.float64)
    bias = torch.randn(96, dtype=vllm_on_cpu.DTYPE)
    for rank in range(2):
        with vllm_on_cpu.engine(rank, 2):
            layer = linear.RowParallelLinear(k, 96, quant_config=config, prefix=f"{MLP}.down_proj")
            layer.reduce_results = False
            vllm_on_cpu.load(layer, state(down) | {"bias": bias})
            vllm_on_cpu.settle(layer)
            total += layer(x.chunk(2, -1)[rank].contiguous())[0].double()
    expected = x.double() @ down.dequantized_weight().double().t() + bias.double()
    # But for 16-bit activations, a rank rounds its own inputs to 8 bits.
    error = (total - expected).norm() / expected.norm()
    assert error < (2**-7 if keeps_inputs(scheme) else 0.04), float(error)


def test_parts_of_several_kinds_and_odd_sizes(seed: int) -> None:
    gate, up = quantised("w4a16-g32", 72), quantised("w8a8-int8", 40)
    x = torch.randn(3, K, dtype=vllm_on_cpu.DTYPE)
    for rank in range(2):
        layer = gate_up(gate, up, rank, 2)
        assert len(layer.epiloq.products) == 2
        torch.testing.assert_close(layer(x)[0], rows_of_rank([gate, up], x, rank, 2), rtol=2**-7, atol=2**-9)


def test_merged_layers_with_one_float_part(seed: int) -> None:
    gate = quantised("w4a16-g32", 64)
    up = nn.Linear(K, 64, bias=False, dtype=vllm_on_cpu.DTYPE)
    x = torch.randn(3, K, dtype=vllm_on_cpu.DTYPE)
    layer = gate_up(gate, up)
    torch.testing.assert_close(layer(x)[0], torch.cat([gate(x), up(x)], -1))


@pytest.mark.parametrize("scheme", ["w4a16-g128", "fp8-token", "w8a8-int8"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_heads_of_attention(seed: int, scheme: str, together: bool, ranks: int) -> None:
    """4 heads of queries and 2 of keys and values, which 4 ranks hold twice; in files apart or merged."""
    head, parts = 16, {"q": 64, "k": 32, "v": 32}
    file = quantised(scheme, sum(parts.values()))
    apart = {name: quantised(scheme, n) for name, n in parts.items()}
    bias = torch.randn(128, dtype=vllm_on_cpu.DTYPE)
    x = torch.randn(3, K, dtype=vllm_on_cpu.DTYPE)
    prefix = "model__layers__0__self_attn__"
    config = configured(**({f"{prefix}qkv_proj": file} if together else {f"{prefix}{n}_proj": apart[n] for n in apart}))
    whole = file(x).split(list(parts.values()), -1) if together else [layer(x) for layer in apart.values()]
    biases = bias.split(list(parts.values()))
    for rank in range(ranks):
        with vllm_on_cpu.engine(rank, ranks):
            name = "model.layers.0.self_attn.qkv_proj"
            layer = linear.QKVParallelLinear(K, head, 4, 2, bias=True, quant_config=config, prefix=name)
            if together:
                vllm_on_cpu.load(layer, state(file) | {"bias": bias})
            else:
                for (part, module), values in zip(apart.items(), biases, strict=True):
                    vllm_on_cpu.load(layer, state(module) | {"bias": values}, part)
            vllm_on_cpu.settle(layer)
        shares = (ranks, min(ranks, 2), min(ranks, 2))
        expected = torch.cat(
            [
                (y.float() + b.float()).chunk(share, -1)[rank * share // ranks]
                for y, b, share in zip(whole, biases, shares, strict=True)
            ],
            -1,
        )
        torch.testing.assert_close(layer(x)[0].float(), expected, rtol=2**-6, atol=2**-6)


def test_replicated_layers(seed: int) -> None:
    gate = quantised("w8a16", 24)
    config = configured(model__layers__0__mlp__gate=gate)
    with vllm_on_cpu.engine(1, 2):
        layer = linear.ReplicatedLinear(K, 24, bias=False, quant_config=config, prefix=f"{MLP}.gate")
        vllm_on_cpu.load(layer, state(gate))
        vllm_on_cpu.settle(layer)
    x = torch.randn(3, K, dtype=vllm_on_cpu.DTYPE)
    assert torch.equal(layer(x)[0], gate(x))


def test_unsupported_layers_are_refused_by_name(seed: int) -> None:
    gate = quantised("w8a16", 24)
    config = configured(lm_head=gate)
    with (
        vllm_on_cpu.engine(),
        pytest.raises(ValueError, match="epiloq: lm_head: expected only quantised linear layers"),
    ):
        ParallelLMHead(24, K, quant_config=config, prefix="lm_head")
    config = configured(model__layers__0__mlp__gate=gate)
    with vllm_on_cpu.engine():
        other = linear.ReplicatedLinear(K, 24, bias=False, quant_config=config, prefix="model.layers.0.mlp.other")
        assert isinstance(other.quant_method, linear.UnquantizedLinearMethod)
        layer = linear.ReplicatedLinear(K, 24, bias=False, quant_config=config, prefix=f"{MLP}.gate")
        with pytest.raises(FormatError, match=r"model.layers.0.mlp.gate: expected tensors, found none"):
            vllm_on_cpu.settle(layer)
    with pytest.raises(FormatError, match="format_version: expected"):
        EpiloqConfig.from_config({"format": "epiloq", "format_version": 99, "modules": []})


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


def test_names_as_the_engine_maps_them(seed: int) -> None:
    """It renames modules, and drops those that it does not run, such as layers for multi-token prediction."""
    config = configured(model__layers__0__mlp__gate=quantised("w8a16", 24), mtp__layers__0__gate=quantised("w8a16", 24))
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"mtp.": None, "model.": "language_model.model."}))
    assert list(config.layers) == ["language_model.model.layers.0.mlp.gate"]


def test_other_formats_are_not_taken() -> None:
    method = get_quantization_config("epiloq")
    assert method.override_quantization_method({"quant_method": "gptq", "format": "epiloq"}, None) is None
    assert method.override_quantization_method({"format": "epiloq", "quant_method": ""}, "fp8") is None
    assert method.override_quantization_method({"quant_method": "fp8"}, None) is None


def test_traced_whole(seed: int) -> None:
    layer = gate_up(quantised("w4a16-g32", 72), quantised("fp8-token", 40), 1, 2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for tokens in (3, 17):
            x = torch.randn(tokens, K, dtype=vllm_on_cpu.DTYPE)
            assert torch.equal(compiled(x), layer(x)[0])
