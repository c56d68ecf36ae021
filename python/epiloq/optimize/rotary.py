"""Attention as in Llama, Qwen3 and GPT-OSS, with one product for query, key and value, and heads rotated together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from epiloq._torch.calls import direct
from epiloq._torch.tracing import is_exporting
from epiloq.ops.attention.rotate_and_store import rotate_and_store, rotated
from epiloq.optimize import attention as by_sdpa
from epiloq.optimize import sinks
from epiloq.optimize.forms import RotaryForm
from epiloq.optimize.guards import are_plain, untouched, wants_gradient
from epiloq.optimize.norms import NORMS, eps_of, factor_of, factor_of_graph
from epiloq.optimize.siblings import Siblings

ATTENTION = ("q_proj", "k_proj", "v_proj")
ATTENTION_IN_ONE = ("qkv_proj",)
CACHES = ("cache", "past_key_values")
"""Names of the cache's argument in versions of transformers."""


def rotary_attention(
    attention: Any, siblings: Siblings, form: RotaryForm, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """``forward`` of a module that `structure.rotary_form_of` recognised. The module's own runs if this one is not
    applicable at run time: a gradient, an adapter or a hook, another attention, a call of another form."""
    x = kwargs.get("hidden_states")
    if args or x is None or not _fits(attention, siblings, form, x):
        return type(attention).forward(attention, *args, **kwargs)  # type: ignore[no-any-return]
    rest = dict(kwargs)
    del rest["hidden_states"]
    (cos, sin), mask = rest.pop("position_embeddings"), rest.pop("attention_mask", None)
    held = None
    for name in CACHES:  # one of them
        held = rest.pop(name, held)
    shape, width = x.shape[:-1], attention.head_dim
    if cos.shape[-1] != angle_width_of(attention, form):  # which rotates a part of each head
        return type(attention).forward(attention, *args, **kwargs)  # type: ignore[no-any-return]
    counts = counts_of(attention, siblings)
    heads = siblings.whole(x).view(*shape, -1, width)
    query, key, value = rotated_heads(attention, form.norms_heads, heads, counts, cos, sin, held)
    query = query.transpose(1, 2)
    attend = sinks.sink_attention if form.has_sinks else by_sdpa.grouped_sdpa
    attended, weights = attend(attention, query, key, value, mask, scaling=attention.scaling, **rest)
    return attention.o_proj(attended.reshape(*shape, -1).contiguous()), weights


def angle_width_of(attention: Any, form: RotaryForm) -> int:
    """Angles of a head that is rotated as a whole."""
    width: int = attention.head_dim
    return width // 2 if form.has_sinks else width


def counts_of(attention: Any, siblings: Siblings) -> list[int]:
    """Heads of query, key and value."""
    counts = [size // attention.head_dim for size in siblings.sizes]
    if len(counts) == 1:
        shared = attention.num_key_value_heads
        counts = [counts[0] - 2 * shared, shared, shared]
    return counts


def with_normed_heads(attention: Any, heads: Tensor, counts: Sequence[int]) -> Tensor:
    """Heads ``[B, T, H + 2 H_kv, D]``, those of query and key normed."""
    query, key, value = heads.split(counts, -2)
    return torch.cat((attention.q_norm(query), attention.k_norm(key), value), -2)


class _Norms(NamedTuple):
    """What normed query and key heads are multiplied by, and what is added to the mean of their squares."""

    query: Tensor
    key: Tensor
    eps: float


def _norms_of(attention: Any, heads: Tensor) -> _Norms | None:
    """None if the norms must be called."""
    both = attention.q_norm, attention.k_norm
    if not all(untouched(norm, *NORMS) for norm in both):
        return None
    forwards: list[Any] = [vars(norm).get("forward") for norm in both]
    if not all(isinstance(forward, partial) for forward in forwards):
        return None
    if wants_gradient(*(norm.weight for norm in both)):
        return None
    query, key = (factor_of_graph(f, heads) if is_compiling() else factor_of(f, heads) for f in forwards)
    eps, other = (eps_of(forward) for forward in forwards)
    if query is None or key is None or query.dtype != key.dtype or eps != other:
        return None
    return _Norms(query, key, eps) if query.shape == key.shape == heads.shape[-1:] else None


def rotated_heads(
    attention: Any,
    norms_heads: bool,
    heads: Tensor,
    counts: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    cache: Any,
    checked: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated query heads ``[B, T, H, D]``, with `norms_heads` normed before, and the keys and values to attend to
    ``[B, H_kv, L, D]``, including the cached ones. `checked`: heads and angles are plain, of one type, in eager mode.

    In eager mode, and in the graph of a decode step, one launch norms, rotates and writes to a static cache, as
    launches limit both; one of 8 bits it writes quantised. In other graphs inductor fuses the general implementation.
    """
    (query_heads, key_heads, _), index = counts, attention.layer_idx
    norms = _norms_of(attention, heads) if norms_heads else None
    if norms_heads and norms is None:
        heads, norms_heads = with_normed_heads(attention, heads, counts), False
    alike = checked or cos.dtype == sin.dtype == heads.dtype
    layer = _static_layer(cache, index, heads) if alike else None
    if is_compiling():
        alike = layer is not None and heads.shape[1] == 1 and not is_exporting() and not wants_gradient(heads)
        alike = alike and all(type(t) is Tensor for t in (heads, cos, sin))
    else:
        alike = alike and (checked or direct((heads, cos, sin)))
    if alike:
        cos, sin = cos.contiguous(), sin.contiguous()
        if layer is not None:
            key_scale, value_scale = _scales_of(layer)
            if key_scale is not None:
                layer.check_room(heads.shape[1])
            query_norm, key_norm, eps = norms or (None, None, 0.0)
            query = rotate_and_store(
                heads,
                query_heads,
                cos,
                sin,
                layer.keys,
                layer.values,
                layer.cumulative_length,
                query_norm,
                key_norm,
                eps,
                key_scale,
                value_scale,
            )
            return (query, layer.keys, layer.values) if key_scale is None else (query, *layer.handed())
        key, value = (heads.new_empty((heads.shape[0], key_heads, *heads.shape[1::2])) for _ in range(2))
        query = rotate_and_store(heads, query_heads, cos, sin, key, value, None, *(norms or ()))
    else:
        if norms_heads:
            heads = with_normed_heads(attention, heads, counts)
        both, value = heads.split([query_heads + key_heads, counts[2]], -2)
        query, key = rotated(both, cos, sin).split([query_heads, key_heads], -2)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, index)
    return query, key, value


# Caches that `rotate_and_store` may write to, and their layers; subclasses of either may store otherwise.
_STATIC = {
    "transformers.cache_utils.StaticCache": "transformers.cache_utils.StaticLayer",
    "epiloq.kv_cache.QuantizedCache": "epiloq.kv_cache.QuantizedStaticLayer",
}


def _class_of(found: Any) -> str:
    return f"{type(found).__module__}.{type(found).__qualname__}"


def _static_layer(cache: Any, index: int, heads: Tensor) -> Any:
    """The layer of a static cache to which `rotate_and_store` may write, or None."""
    kind = _STATIC.get(_class_of(cache))
    if kind is None or getattr(cache, "offloading", False):
        return None
    layer = cache.layers[index]
    if _class_of(layer) != kind or not layer.is_initialized:
        return None
    scales = _scales_of(layer)
    held = layer.keys, layer.values, layer.cumulative_length, *(scale for scale in scales if scale is not None)
    if not (all(type(t) is Tensor for t in held) if is_compiling() else are_plain(*held)):
        return None
    dtype = layer.keys.dtype if scales[0] is None else scales[0].dtype
    return layer if dtype == heads.dtype and layer.keys.shape[0] == heads.shape[0] else None


def _scales_of(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    """Scales ``[B, H_kv, L]`` of a layer's keys and values, if they have 8 bits."""
    key_scale, value_scale = getattr(layer, "key_scale", None), getattr(layer, "value_scale", None)
    return (None, None) if key_scale is None or value_scale is None else (key_scale[..., 0], value_scale[..., 0])


def names_of(form: RotaryForm) -> tuple[str, ...]:
    """The names by which a model asks for the attention of this form."""
    return sinks.NAMES if form.has_sinks else by_sdpa.NAMES


def _fits(attention: Any, siblings: Siblings, form: RotaryForm, x: Tensor) -> bool:
    if attention.training or attention.config._attn_implementation not in names_of(form) or is_exporting():
        return False
    return siblings.unchanged_in(attention) and not wants_gradient(x)
