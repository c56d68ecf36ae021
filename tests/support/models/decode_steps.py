"""Decoding with optimised models, a token at a time."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import epiloq

PROMPT = 6


def cache_of(model: Any, kind: str) -> Any:
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=16)
    if kind == "int8":
        return epiloq.QuantizedCache(model.config)
    return transformers.DynamicCache(config=model.config)


def held(cache: Any) -> dict[str, Any]:
    """The cache by the name that this version of transformers has for it."""
    named = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    return {"cache" if named else "past_key_values": cache}


@torch.no_grad()
def decoded(model: Any, x: Tensor, kind: str = "static", **options: Any) -> Tensor:
    """Logits of three steps after a prompt."""
    cache, found = cache_of(model, kind), []
    model(x[:, :PROMPT], use_cache=True, **held(cache))
    for i in range(PROMPT, PROMPT + 3):
        found.append(model(x[:, i : i + 1], use_cache=True, **held(cache), **options).logits)
    return torch.cat(found, 1)


class Doubled(nn.Module):
    """A module that replaces another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.inner(*args, **kwargs)
