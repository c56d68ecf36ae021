"""Rotary embedding of new tokens, stored into a cache of fixed size."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, mark_written
from epiloq._torch.library import register
from epiloq.ops.attention.cached_heads import quantize_heads
from epiloq.ops.quantizers.rms_norm import rms_norm

_NAME = "rotate_and_store"


def rotate_and_store(
    heads: Tensor,
    query_heads: int,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Return rotated query heads, and write rotated keys, and values, to their caches; on CUDA in one launch.

    The result is bit-identical to transformers' for Llama, with each product and sum rounded to the dtype. With norms,
    query and key heads are normed before they are rotated, as by `rms_norm`, whose bound this step has. Caches of 8
    bits hold what `cached_heads.quantize_heads` makes of the rounded heads, bit for bit.

    Args:
        heads: ``[B, T, H + 2 H_kv, D]`` float16, bfloat16 or float32, contiguous along D: query, key, value heads.
        query_heads: H.
        cos, sin: ``[B, T, D]`` or ``[1, T, D]`` of that dtype, contiguous: the angles of the tokens; or of half the
            width, ``D / 2``, if both halves have the same, as in GPT-OSS.
        key_cache, value_cache: ``[B, H_kv, L, D]`` of that dtype, or int8, or float8_e4m3fn viewed as uint8, contiguous
            along D; written.
        position: int64, one element on the same device: the first token's position, 0 by default; ``position + T`` is
            at most L. T is added to it.
        query_norm, key_norm: ``[D]`` of that dtype or float32: what a head divided by its root mean square is
            multiplied by. Both or none.
        eps: added to the mean square.
        key_scale, value_scale: ``[B, H_kv, L]`` of heads' dtype, contiguous along L, for caches of 8 bits; written.

    Returns:
        ``[B, T, H, D]``.

    For inference only: there is no derivative, and this is not checked.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    scales = (key_scale, value_scale)
    arguments = (heads, query_heads, cos, sin, key_cache, value_cache, position, query_norm, key_norm, eps, *scales)
    if direct((heads, cos, sin, key_cache, value_cache), (position, query_norm, key_norm, *scales)):
        return run(*arguments)
    query: Tensor = torch.ops.epiloq.rotate_and_store(*arguments)
    return query


def run(
    heads: Tensor,
    query_heads: int,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor | None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """`rotate_and_store` for plain tensors."""
    query, scales = _like_query(heads, query_heads), (key_scale, value_scale)
    arguments = (query, heads, cos, sin, key_cache, value_cache, position, query_norm, key_norm, eps, *scales)
    if heads.is_cuda and heads.numel() > 0:
        _core.rotate_and_store(*arguments)
    else:
        _core.check_rotate_and_store(*arguments)
        keys = key_cache.shape[1]
        both, values = heads.split([query_heads + keys, keys], 2)
        if query_norm is not None and key_norm is not None:
            parts = zip(both.split([query_heads, keys], 2), (query_norm, key_norm), strict=True)
            both = torch.cat([rms_norm(part.contiguous(), norm, eps) for part, norm in parts], 2)
        turned, places = rotated(both, cos, sin), torch.arange(heads.shape[1], device=heads.device)
        places = places if position is None else places + position
        query.copy_(turned[:, :, :query_heads])
        for cache, scale, states in (
            (key_cache, key_scale, turned[:, :, query_heads:].transpose(1, 2)),
            (value_cache, value_scale, values.transpose(1, 2)),
        ):
            if scale is not None:
                states, of_states = quantize_heads(states, "int8" if cache.dtype == torch.int8 else "fp8")
                scale.index_copy_(2, places, of_states[..., 0])
            cache.index_copy_(2, places, states)
        if position is not None:
            position.add_(heads.shape[1])
    mark_written(key_cache, value_cache, position, *scales)
    return query


def _like_query(heads: Tensor, query_heads: int, *_: Tensor | float | None) -> Tensor:
    return heads.new_empty((*heads.shape[:2], query_heads, heads.shape[-1]))


register(
    _NAME,
    f"{_NAME}(Tensor heads, int query_heads, Tensor cos, Tensor sin, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor(c!)? position, Tensor? query_norm=None, Tensor? key_norm=None, float eps=0.0, Tensor(d!)? key_scale=None, "
    "Tensor(e!)? value_scale=None) -> Tensor",
    run,
    _like_query,
)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads ``[B, T, H, D]`` rotated by tokens' angles ``[B, T, D]``, or ``[B, T, D / 2]`` for both halves, each
    product rounded as in transformers."""
    if cos.shape[-1] != heads.shape[-1]:
        cos, sin = (torch.cat((angles, angles), -1) for angles in (cos, sin))
    first, second = heads.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return heads * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)
