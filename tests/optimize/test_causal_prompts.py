"""Compiled prompts attend causally without a mask, where that is what the mask would say, and with it elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("transformers")
import transformers

from epiloq.models.cache_argument import cache_argument
from epiloq.optimize import optimize_
from small_models import quantised, relative, tokens

CLOSE = 1e-4  # of float32 logits, with weights in 8 bits and activations in 32


def compiled(model: Any) -> tuple[Any, list[bool]]:
    """The compiled model, and a list that gets, for each call of attention in its graphs, whether there is a mask."""
    masked: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        calls = [node for node in graph.graph.nodes if node.target is scaled_dot_product_attention]
        masked.extend(call.kwargs.get("attn_mask") is not None for call in calls)
        assert all(call.kwargs.get("is_causal") is not (call.kwargs.get("attn_mask") is not None) for call in calls)
        return graph

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend), masked


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma"])
@torch.no_grad()
def test_without_padding(seed: int, family: str) -> None:
    model, x = quantised(family, "w8a16"), tokens()
    expected = model(x).logits
    optimize_(model)
    called, masked = compiled(model)
    assert relative(called(x).logits, expected) <= CLOSE
    assert masked == [False] * model.config.num_hidden_layers


@torch.no_grad()
def test_padding_needs_a_mask(seed: int) -> None:
    model, x = quantised("llama", "w8a16"), tokens()
    padding = torch.ones_like(x)
    padding[0, :3] = 0
    expected = model(x, attention_mask=padding).logits
    assert relative(model(x).logits[0, 3:], expected[0, 3:]) > 1e-2
    optimize_(model)
    called, masked = compiled(model)
    assert relative(called(x, attention_mask=padding).logits[0, 3:], expected[0, 3:]) <= CLOSE
    assert masked == [True] * model.config.num_hidden_layers


@pytest.mark.slow
@torch.no_grad()
def test_a_window_shorter_than_the_prompt_needs_a_mask(seed: int) -> None:
    model, x = quantised("mistral", "w8a16"), tokens()
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config.sliding_window = x.shape[1] // 2
    expected = model(x).logits
    optimize_(model)
    called, masked = compiled(model)
    assert relative(called(x).logits, expected) <= CLOSE
    assert masked == [True] * model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [False, True])
@torch.no_grad()
def test_a_prompt_after_other_tokens_needs_a_mask(seed: int, is_static: bool) -> None:
    model, x = quantised("llama", "w8a16"), tokens()
    name = cache_argument(model)

    def halves(called: Any) -> torch.Tensor:
        sizes: dict[str, Any] = {"max_cache_len": x.shape[1]} if is_static else {}
        kind = transformers.StaticCache if is_static else transformers.DynamicCache
        given = {name: kind(config=model.config, **sizes)}
        parts = x.chunk(2, 1)
        return torch.cat([called(part, **given).logits for part in parts], 1)

    expected = halves(model)
    optimize_(model)
    called, masked = compiled(model)
    assert relative(halves(called), expected) <= CLOSE
    layers = model.config.num_hidden_layers
    assert masked == [False] * layers + [True] * layers  # the first half is a prompt


@pytest.mark.slow
@torch.no_grad()
def test_packed_sequences_need_a_mask(seed: int) -> None:
    """Positions that begin anew, without a cache, separate sequences."""
    model, x = quantised("llama", "w8a16"), tokens()[:1]
    positions = torch.arange(x.shape[1])[None] % (x.shape[1] // 2)
    expected = model(x, position_ids=positions, use_cache=False).logits
    assert relative(model(x, use_cache=False).logits, expected) > 1e-2
    optimize_(model)
    called, masked = compiled(model)
    assert relative(called(x, position_ids=positions, use_cache=False).logits, expected) <= CLOSE
    assert masked == [True] * model.config.num_hidden_layers
