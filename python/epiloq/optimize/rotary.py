"""Llama's attention with one product for query, key and value, whose query and key heads are rotated together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq.optimize.attention import NAMES, grouped_sdpa
from epiloq.optimize.siblings import Siblings

ATTENTION = ("q_proj", "k_proj", "v_proj")
CACHES = ("cache", "past_key_values")
"""What versions of transformers call the cache."""


def rotary_attention(attention: Any, siblings: Siblings, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The ``forward`` of a module that `structure.attends_by_rotary` recognised; its own where something does not fit
    at run time: a gradient, an adapter or a hook, another attention, a call of another form."""
    x = kwargs.get("hidden_states")
    if args or x is None or not _fits(attention, siblings, x):
        return type(attention).forward(attention, *args, **kwargs)  # type: ignore[no-any-return]
    rest = dict(kwargs)
    del rest["hidden_states"]
    (cos, sin), mask = rest.pop("position_embeddings"), rest.pop("attention_mask", None)
    cache = None
    for name in CACHES:  # one of them
        cache = rest.pop(name, cache)
    shape, width = x.shape[:-1], attention.head_dim
    query_heads, key_heads, value_heads = [size // width for size in siblings.sizes]
    heads = siblings.whole(x).view(*shape, -1, width)
    both, value = heads.split([query_heads + key_heads, value_heads], -2)
    query, key = rotated(both, cos, sin).split([query_heads, key_heads], -2)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    attended, weights = grouped_sdpa(attention, query, key, value, mask, scaling=attention.scaling, **rest)
    return attention.o_proj(attended.reshape(*shape, -1).contiguous()), weights


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads ``[B, T, H, D]`` by the angles ``[B, T, D]`` of their tokens: each product rounded, as in transformers."""
    first, second = heads.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return heads * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


def _fits(attention: Any, siblings: Siblings, x: Tensor) -> bool:
    children = attention._modules
    for name, layer in zip(ATTENTION, siblings.layers, strict=True):
        if children[name] is not layer or layer._forward_hooks or layer._forward_pre_hooks:
            return False
    wants_gradient = torch.is_grad_enabled() and x.requires_grad
    return not wants_gradient and not attention.training and attention.config._attn_implementation in NAMES
