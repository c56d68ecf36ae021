"""epiloq in SGLang's own layers on a CPU: its own checkpoints, and its products behind hooks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sglang.srt.plugins", reason="SGLang is not installed")
pytest.importorskip("sglang.srt.layers.linear")
from sglang.srt.layers import linear
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.plugins.hook_registry import HookRegistry

import epiloq.integrations.sglang as integration
from engine_schemes import LAYERS_OF_ENGINES, converted, keeps_inputs, products_of
from epiloq.formats import epiloq_modules
from epiloq.integrations.engines.choice import VARIABLE
from epiloq.integrations.sglang import products
from epiloq.integrations.sglang.checkpoint import EpiloqConfig, EpiloqLinearMethod

K, DTYPE = 256, torch.bfloat16


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    integration.register()
    integration.register()
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    yield
    torch.set_default_dtype(default)


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    """Layers made from now on are those of a rank."""
    group = None if ranks == 1 else SimpleNamespace(rank_in_group=rank, world_size=ranks)
    monkeypatch.setattr(linear, "_resolve_linear_group", lambda _: group)


def quantised(scheme: str, n: int, k: int = K) -> Any:
    layer = nn.Linear(k, n, bias=False, dtype=DTYPE)
    nn.init.normal_(layer.weight, std=k**-0.5)
    return converted(scheme, layer)


def configured(layers: dict[str, Any]) -> EpiloqConfig:
    described = {
        name: (type(m).__name__, epiloq_modules.KINDS[type(m).__name__].options_of(m)) for name, m in layers.items()
    }
    message = json.loads(json.dumps(epiloq_modules.config(epiloq_modules.groups_of(described))))
    method = get_quantization_config("epiloq")
    assert method.override_quantization_method(message, None) == "epiloq"
    assert method.override_quantization_method(message | {"quant_method": "gptq"}, None) is None
    return method.from_config(message)


def load(layer: nn.Module, tensors: dict[str, Tensor], *shard: Any) -> None:
    parameters = dict(layer.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].weight_loader(parameters[name], tensor, *shard)


@pytest.mark.parametrize("scheme", LAYERS_OF_ENGINES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_merged_layers_of_every_scheme(seed: int, scheme: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = "model.layers.0.mlp"
    gate, up = quantised(scheme, 256), quantised(scheme, 512)
    config = configured({f"{prefix}.gate_proj": gate, f"{prefix}.up_proj": up})
    for rank in range(ranks):
        on_rank(monkeypatch, rank, ranks)
        layer = linear.MergedColumnParallelLinear(
            K, [256, 512], bias=False, quant_config=config, prefix=f"{prefix}.gate_up_proj"
        )
        assert isinstance(layer.quant_method, EpiloqLinearMethod)
        load(layer, gate.file_state(), 0)
        load(layer, up.file_state(), 1)
        layer.quant_method.process_weights_after_loading(layer)
        assert len(layer.epiloq.products) == products_of(gate, up)
        x = torch.randn(3, K, dtype=DTYPE)
        expected = torch.cat([module(x).chunk(ranks, -1)[rank] for module in (gate, up)], -1)
        assert torch.equal(layer.quant_method.apply(layer, x), expected)


@pytest.mark.parametrize("scheme", LAYERS_OF_ENGINES)
def test_row_parallel_layers_add_up(seed: int, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    down, k = quantised(scheme, 96, 416), 416
    config = configured({"model.layers.0.mlp.down_proj": down})
    x, total = torch.randn(5, k, dtype=DTYPE), torch.zeros(5, 96, dtype=torch.float64)
    for rank in range(2):
        on_rank(monkeypatch, rank, 2)
        layer = linear.RowParallelLinear(
            k, 96, bias=False, quant_config=config, prefix="model.layers.0.mlp.down_proj", reduce_results=False
        )
        load(layer, down.file_state())
        layer.quant_method.process_weights_after_loading(layer)
        total += layer.quant_method.apply(layer, x.chunk(2, -1)[rank].contiguous()).double()
    expected = x.double() @ down.dequantized_weight().double().t()
    error = (total - expected).norm() / expected.norm()
    assert error < (2**-7 if keeps_inputs(scheme) else 0.04), float(error)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_heads_of_attention(seed: int, together: bool, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 heads of queries and 2 of keys and values, which 4 ranks hold twice; in files apart or merged."""
    parts, prefix = {"q": 64, "k": 32, "v": 32}, "model.layers.0.self_attn"
    apart = {name: quantised("w8a8-int8", n) for name, n in parts.items()}
    file = quantised("w8a8-int8", 128)
    config = configured(
        {f"{prefix}.qkv_proj": file} if together else {f"{prefix}.{name}_proj": m for name, m in apart.items()}
    )
    x = torch.randn(3, K, dtype=DTYPE)
    whole = file(x).split(list(parts.values()), -1) if together else [module(x) for module in apart.values()]
    for rank in range(ranks):
        on_rank(monkeypatch, rank, ranks)
        layer = linear.QKVParallelLinear(K, 16, 4, 2, bias=False, quant_config=config, prefix=f"{prefix}.qkv_proj")
        if together:
            load(layer, file.file_state())
        for name, module in () if together else apart.items():
            load(layer, module.file_state(), name)
        layer.quant_method.process_weights_after_loading(layer)
        shares = (ranks, min(ranks, 2), min(ranks, 2))
        expected = [y.chunk(share, -1)[rank * share // ranks] for y, share in zip(whole, shares, strict=True)]
        assert torch.equal(layer.quant_method.apply(layer, x), torch.cat(expected, -1))


def test_other_layers_are_refused_by_name(seed: int) -> None:
    config = configured({"lm_head": quantised("w8a16", 24)})
    with pytest.raises(ValueError, match="epiloq: lm_head: expected only quantised linear layers"):
        config.get_quant_method(nn.Embedding(24, K), "lm_head")
    assert config.get_quant_method(nn.Embedding(24, K), "model.embed_tokens") is None


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8-block"])
def test_hooks_exchange_products(seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook is registered where a function is; without it as well as with it the product is the same."""
    target = next(name for name, its in products.TARGETS.items() if its == kind)
    module, _, name = target.rpartition(".")
    namespace = __import__(module, fromlist=[name])
    called: list[str] = []

    def original(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out_dtype: torch.dtype, bias: Any = None) -> Tensor:
        called.append(kind)
        spread = kind == "fp8-block"
        sa = sa.repeat_interleave(128, 1) if spread else sa.view(-1, 1)
        sb = sb.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : b.shape[1]] if spread else sb.view(1, -1)
        values = (a.double() * sa) @ (b.double() * sb)
        return (values if bias is None else values + bias.double()).to(out_dtype)

    monkeypatch.setattr(namespace, name, original, raising=False)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    products.register()
    products.register()
    HookRegistry.apply_hooks()
    hooked = getattr(namespace, name)
    assert hooked is not original and len(HookRegistry._hooks[target]) == 1
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    blocks = kind == "fp8-block"
    for n, message, expected in ((64, "all", []), (61, "all", [kind]), (64, "none", [kind])):
        monkeypatch.setenv(VARIABLE, message)
        a, b = (torch.randint(-40, 40, (rows, K)).float().to(dtype) for rows in (5, n))
        shapes = ((5, 2), (2, 1)) if blocks else ((5, 1), (n,))
        scales = [torch.rand(shape, dtype=torch.float32) for shape in shapes]
        wanted = original(a, b.t(), *scales, DTYPE)
        called.clear()
        y = hooked(a, b.t(), *scales, DTYPE)
        assert called == expected
        torch.testing.assert_close(y, wanted, rtol=2**-7, atol=1e-4)
