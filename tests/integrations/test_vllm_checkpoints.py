"""Checkpoints of epiloq's own format in vLLM's own layers, loaded by its weight loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

import epiloq.integrations.vllm as integration
from engine_schemes import LAYERS_OF_ENGINES, keeps_inputs, products_of
from epiloq.formats.layouts.base import FormatError
from epiloq.integrations.vllm.checkpoint import EpiloqConfig, EpiloqLinearMethod
from vllm_own_format import K, configured, quantised, state

SIZES, MLP = [128, 64], "model.layers.0.mlp"


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()
    integration.register()


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
