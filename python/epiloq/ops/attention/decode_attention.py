"""Attention of one new token per sequence over a key-value cache, with grouped-query heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, mark_written
from epiloq._torch.library import register_product

_NAME = "decode_attention"
# Tokens of a cache that are in float32 at a time where there is no kernel, and torch's own attention does not do.
_AT_ONCE = 1024


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``softmax(scale * q @ k.T) @ v`` for one token per sequence, without dequantising the cache to memory.

    With G = H / H_kv, query heads ``h G`` to ``h G + G - 1`` share key head ``h``. On CUDA, for heads of 64, 128 or 256
    elements of 16 bits, a kernel reads keys and values once for all of them and splits the tokens among CTAs; scores,
    softmax and sums are in fp32. Scales are applied to scores and probabilities, so that an 8-bit cache is never copied
    to 16 bits. Otherwise torch computes it, for an 8-bit cache and with sinks a few tokens at a time in float32.

    Args:
        query: ``[B, H, D]`` float16, bfloat16 or float32, contiguous along D.
        key, value: ``[B, H_kv, T, D]`` of query's dtype, or int8, or float8_e4m3fn viewed as uint8; contiguous along D.
        mask: bool ``[B, T]`` or ``[1, T]``, contiguous along T: tokens to attend to. If there are none the result is 0.
        key_scale, value_scale: ``[B, H_kv, T]`` of query's dtype, contiguous along T, for an 8-bit cache.
        scale: 1 / sqrt(D) by default.
        sinks: ``[H]`` of query's dtype, contiguous, as in GPT-OSS: one more score of each head in its softmax, without
            a value; minus infinity is none.
        out: ``[B, H, D]``, contiguous, sharing no memory with inputs; written and returned.

    Returns:
        ``[B, H, D]`` of query's dtype.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass; the operation has no derivative.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    arguments = (query, key, value, mask, key_scale, value_scale, scale, sinks)
    if direct((query, key, value), (mask, key_scale, value_scale, sinks, out)):
        return run(*arguments, out=out)
    optional = {"mask": mask, "key_scale": key_scale, "value_scale": value_scale, "sinks": sinks, "out": out}
    return dispatched(_NAME, {"query": query, "key": key, "value": value}, optional, arguments)


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`decode_attention` for plain tensors."""
    result = query.new_empty(query.shape) if out is None else out
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"epiloq.{_NAME}: mask: expected torch.bool, got {mask.dtype}")
    of_bytes = None if mask is None else mask.view(torch.uint8)
    arguments = (result, query, key, value, of_bytes, key_scale, value_scale, scale, sinks)
    if not query.is_cuda:
        _core.check_decode_attention(*arguments)
    if query.is_cuda and _core.decode_attention(*arguments, _workspace(query, key)):
        pass
    elif key_scale is None and sinks is None:
        _by_sdpa(result, query, key, value, mask, scale)
    else:
        _by_torch(result, query, key, value, mask, key_scale, value_scale, scale, sinks)
    if out is not None:
        mark_written(out)
    return result


def _workspace(query: Tensor, key: Tensor) -> Tensor | None:
    """Memory for partial results of long contexts, if the kernel uses it."""
    if query.ndim != 3 or key.ndim != 4:
        return None
    (batch, heads, width), (_, key_heads, tokens, _) = query.shape, key.shape
    count = _core.decode_attention_workspace(batch, heads, key_heads, tokens, width, query.device.index)
    return query.new_empty(count, dtype=torch.float32) if count else None


@torch.no_grad()
def _by_sdpa(out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> None:
    if out.numel() == 0:
        return
    # The query heads of one key head as rows of one product; cuDNN takes another kernel, and more CTAs, with
    # enable_gqa.
    (batch, heads, width), by_cudnn = query.shape, query.is_cuda and query.dtype != torch.float32
    rows = query.unsqueeze(2) if by_cudnn else query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    result = torch.nn.functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=None if mask is None else mask[:, None, None], scale=scale, enable_gqa=by_cudnn
    )
    result = result.reshape(out.shape)
    # If all tokens are masked, torch returns NaN or 0.
    out.copy_(result if mask is None else torch.where(mask.any(-1)[:, None, None], result, 0))


@torch.no_grad()
def _by_torch(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> None:
    """In float32."""
    (batch, heads, width), tokens = query.shape, key.shape[2]
    if out.numel() == 0:
        return
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width).float() * scale
    scores = grouped.new_empty((*grouped.shape[:3], tokens))
    chunks = [slice(0, tokens)] if key.dtype == torch.float32 else _token_chunks(tokens)
    for some in chunks:
        torch.matmul(grouped, _widened(key[:, :, some]).transpose(-1, -2), out=scores[..., some])
    if key_scale is not None:
        scores *= key_scale[:, :, None].float()
    if mask is not None:
        scores.masked_fill_(~mask[:, None, None], -torch.inf)
    if sinks is not None:
        of_heads = sinks.float().view(1, key.shape[1], -1, 1).expand(batch, -1, -1, -1)
        scores = torch.cat((scores, of_heads), -1)
    weights = torch.softmax(scores, -1)[..., :tokens]
    if value_scale is not None:
        weights = weights * value_scale[:, :, None].float()
    total = torch.zeros_like(grouped)
    for some in chunks:
        total += weights[..., some] @ _widened(value[:, :, some])
    total = total.reshape(out.shape)
    out.copy_(total if mask is None else torch.where(mask.any(-1)[:, None, None], total, 0))


def _token_chunks(tokens: int) -> list[slice]:
    return [slice(first, min(first + _AT_ONCE, tokens)) for first in range(0, tokens, _AT_ONCE)]


def _widened(values: Tensor) -> Tensor:
    return (values.view(torch.float8_e4m3fn) if values.dtype == torch.uint8 else values).float()


def _fake(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? key_scale, Tensor? value_scale"
register_product(
    _NAME, f"{_TENSORS}, float scale, Tensor? sinks=None", run, _fake, depth=lambda query, key, *_: 2 * key.shape[-2]
)  # scores, and weighted sums
