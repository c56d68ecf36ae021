"""Attention and caches of optimised models."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytest.importorskip("transformers")
import transformers

import epiloq
from epiloq.ops.attention.rotate_and_store import rotated
from epiloq.optimize import optimize_
from small_models import SIZES, logits, quantised, relative, tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_are_rotated_as_in_transformers(seed: int, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    heads, (cos, sin) = torch.randn(2, 5, 6, 16).to(dtype), torch.randn(2, 2, 5, 16).to(dtype).unbind()
    query, key = (part.transpose(1, 2) for part in heads.split([4, 2], 2))
    both = torch.cat(apply_rotary_pos_emb(query, key, cos, sin), 1).transpose(1, 2)
    assert torch.equal(rotated(heads, cos, sin), both)


def test_hooks_put_on_afterwards_are_called(seed: int) -> None:
    model, x = quantised("llama", "w4a16-g32"), tokens()
    optimize_(model)
    expected, seen = logits(model, x), []
    for name in ("q_proj", "v_proj"):
        layer = model.model.layers[1].self_attn.get_submodule(name)
        layer.register_forward_hook(lambda *call: seen.append(call[2].shape))
    assert relative(logits(model, x), expected) <= 1e-5
    assert seen == [(2, 11, 128), (2, 11, 64)]


@torch.no_grad()
def test_attention_module_called_directly(seed: int) -> None:
    """By position, and with another attention than the one that `optimize_` chose."""
    model = quantised("qwen2", "w8a16")
    plain, x = copy.deepcopy(model).model, torch.randn(2, 7, 128)
    optimize_(model)
    angles = model.model.rotary_emb(x, torch.arange(7)[None])
    calls = [module.layers[0].self_attn(x, angles, None)[0] for module in (model.model, plain)]
    assert relative(*calls) <= 1e-5
    named = {"hidden_states": x, "position_embeddings": angles, "attention_mask": None}
    assert relative(model.model.layers[0].self_attn(**named)[0], calls[1]) <= 1e-5
    model.set_attn_implementation("eager")
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    named["attention_mask"] = mask
    assert relative(model.model.layers[0].self_attn(**named)[0], calls[1]) <= 1e-5


@torch.no_grad()
def test_a_static_cache_is_written_in_one_launch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step leaves in the cache is what transformers leaves there; other caches are handed keys and values."""
    from epiloq.optimize import rotary

    model, x, calls = quantised("llama", "w8a16", torch.bfloat16), tokens(), []
    plain = copy.deepcopy(model)
    optimize_(model)
    stored = rotary.rotate_and_store
    # Of each call, whether it wrote from a place of the cache on.
    monkeypatch.setattr(
        rotary, "rotate_and_store", lambda *a: calls.append(len(a) > 6 and a[6] is not None) or stored(*a)
    )
    caches = [transformers.StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    for each, cache in zip((model, plain), caches, strict=True):
        for part in (x[:, :8], x[:, 8:9], x[:, 9:11]):
            each(part, use_cache=True, **{argument(each): cache})
    assert calls == [False] * 2 + [True] * 4  # two layers; the first call makes the cache
    for mine, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(mine.cumulative_length, other.cumulative_length)
        assert relative(mine.keys.float(), other.keys.float()) <= 1e-2
        assert relative(mine.values.float(), other.values.float()) <= 1e-2
    dynamic = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    for each, cache in zip((model, plain), dynamic, strict=True):
        for part in (x[:, :8], x[:, 8:9]):
            each(part, use_cache=True, **{argument(each): cache})
    assert calls[6:] == [False] * 4
    for mine, other in zip(dynamic[0].layers, dynamic[1].layers, strict=True):
        assert relative(mine.keys.float(), other.keys.float()) <= 1e-2
        assert relative(mine.values.float(), other.values.float()) <= 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("family", "quantized"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_generate_compiles_a_step_as_one_graph(seed: int, family: str, quantized: bool) -> None:
    """As transformers does by itself on a GPU where the cache has a fixed size; as many graphs as without `optimize_`
    (two where layers have two kinds of caches)."""
    model, x = quantised(family, "w4a16-g32"), tokens()
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}

    def cache() -> dict[str, Any]:
        if not quantized:
            return {"cache_implementation": "static"}
        return {argument(model): epiloq.QuantizedCache(model.config, max_cache_len=20)}

    compiled = transformers.CompileConfig(fullgraph=True, mode=None, backend="aot_eager")
    compiled._compile_all_devices = True

    def generated() -> tuple[torch.Tensor, int]:
        torch._dynamo.reset()
        counters.clear()
        found = model.generate(x, **options, **cache(), compile_config=compiled)
        return found, counters["stats"]["unique_graphs"]

    _, graphs = generated()
    optimize_(model)
    expected = model.generate(x, **options, **cache())
    found, fused = generated()
    assert torch.equal(found, expected) and fused == graphs <= (1 if family == "llama" else 2)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
# Options beside SIZES, and modules that are fused, in a model of two layers.
OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "Mixtral": ({"num_local_experts": 4}, 11),
    "Qwen3Moe": (EXPERTS, 15),
    "Phi3": ({"pad_token_id": 0}, 11),
    "Granite": ({}, 9),
    "Gemma2": ({"head_dim": 32, "attn_logit_softcapping": None}, 11),
    "Olmo2": ({}, 11),
    "Nemotron": ({}, 0),
}


@pytest.mark.parametrize("cache", ["dynamic", "static", "int8", "int8 static"])
@pytest.mark.parametrize("family", OTHERS)
@torch.no_grad()
def test_other_families_decode_as_before(seed: int, family: str, cache: str) -> None:
    options, fused = OTHERS[family]
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    epiloq.quantize_(model, "w8a16")
    plain, x = copy.deepcopy(model), tokens()
    assert len(optimize_(model).fused) == fused

    def steps(each: Any) -> Tensor:
        kinds: dict[str, Any] = {
            "dynamic": lambda: transformers.DynamicCache(config=each.config),
            "static": lambda: transformers.StaticCache(config=each.config, max_cache_len=16),
            "int8": lambda: epiloq.QuantizedCache(each.config),
            "int8 static": lambda: epiloq.QuantizedCache(each.config, max_cache_len=16),
        }
        held = kinds[cache]()
        parts = (x[:, :8], x[:, 8:9], x[:, 9:10])
        return torch.cat([each(part, use_cache=True, **{argument(each): held}).logits for part in parts], 1)

    # 8 bits of a key or value on an edge may be rounded the other way.
    assert relative(steps(model), steps(plain)) <= (1e-5 if "int8" not in cache else 5e-3)


def argument(model: nn.Module) -> str:
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
