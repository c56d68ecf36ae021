"""Decode with grouped query heads: keys and values are read once for all query heads that share them.

transformers repeats keys and values for each query head where there is a mask, as with a static cache. The query heads
of one key head are rows of one small product instead: for a single new token that is only another shape.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

NAME = "epiloq_sdpa"


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' convention: query ``[B, H, T, D]``, key and value ``[B, H / G, L, D]``, result
    ``[B, T, H, D]``. Anything but one token (T = 1) of grouped heads goes to transformers' own ``sdpa``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, tokens, width = query.shape
    shared_mask = attention_mask is None or attention_mask.shape[1] == 1
    if tokens != 1 or heads == key.shape[1] or not shared_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    grouped = query.reshape(batch, key.shape[1], -1, width)
    result = nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return result.reshape(batch, 1, heads, value.shape[-1]), None


def use_grouped_sdpa_(model: Any) -> bool:
    """Let a model of transformers attend by `grouped_sdpa`, if it uses ``sdpa`` now; whether it does."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True
