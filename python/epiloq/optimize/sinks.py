"""Attention with sinks (GPT-OSS): each head has a number that takes part in the softmax as one more score, of no value.

transformers computes it with ``eager``: it repeats keys and values for each query head, and writes scores to memory
several times. Here one new token uses `decode_attention`, which also reads a quantised cache. Of several tokens torch's
fused attention gives the result without the sink and the logarithm s of the sum of its weights. That result, multiplied
by ``1 / (1 + exp(sink - s))``, is the one with the sink.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.ops.attention.decode_attention import decode_attention
from epiloq.optimize import structure
from epiloq.optimize.attention import hold
from epiloq.optimize.guards import wants_gradient

NAME = "epiloq_sinks"
READS_STORED = "epiloq_sinks_of_stored"
NAMES = (NAME, READS_STORED)
# torch's fused attention reads rows of a mask from multiples of 16 bytes.
_ROW_MULTIPLE = 8


def sink_attention(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention in transformers' convention: query ``[B, H, T, D]``, key and value ``[B, H / G, L, D]``, or `Stored`
    for a quantised cache, a mask ``[B, 1, T, L]`` that is true where a token is seen; result ``[B, T, H, D]``. The
    model's own function runs with gradients, with dropout, if the weights of attention are wanted, for a mask of
    another kind, and for several tokens on a CPU."""
    sinks, scale = module.sinks, query.shape[-1] ** -0.5 if scaling is None else scaling
    is_stored = not isinstance(key, Tensor)
    # A window of one token has a mask of one, which transformers applies to all tokens that a growing cache keeps.
    length = (key.q if is_stored else key).shape[2]
    is_ours = attention_mask is None or (
        attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1 and attention_mask.shape[-1] == length
    )
    is_ours = is_ours and not (
        dropout or kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False)
    )
    is_ours = (
        is_ours
        and hold(query.dtype, key, value)
        and not wants_gradient(query, sinks, *(() if is_stored else (key, value)))
    )
    if is_ours and query.shape[2] == 1 and sinks.dtype == query.dtype:
        return _of_one_token(query, key, value, attention_mask, sinks, scale), None
    if is_stored:
        key, value = key.dequantize(), value.dequantize()
    if is_ours and attention_mask is not None and query.shape[2] > 1 and _has_fused(query):
        return _of_tokens(query, key, value, attention_mask, sinks, scale), None
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = _added(attention_mask, query.dtype)
    own: Any = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return own(module, query, key, value, attention_mask, scaling=scale, dropout=dropout, **kwargs)  # type: ignore[no-any-return]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: not minus infinity, of which a row without any token would make NaN."""
    # Filled on the device: a number from the host would be copied, which a CUDA graph cannot record.
    zero, lowest = (mask.new_full((), number, dtype=dtype) for number in (0, torch.finfo(dtype).min))
    return torch.where(mask, zero, lowest)


def _has_fused(query: Tensor) -> bool:
    """Whether torch's fused attention takes heads of this type and width."""
    widths = {torch.float16: _ROW_MULTIPLE, torch.bfloat16: _ROW_MULTIPLE, torch.float32: _ROW_MULTIPLE // 2}
    return query.is_cuda and query.dtype in widths and query.shape[-1] % widths[query.dtype] == 0


def _of_one_token(query: Tensor, key: Any, value: Any, mask: Tensor | None, sinks: Tensor, scale: float) -> Tensor:
    row = None if mask is None else mask[:, 0, 0]
    if row is not None and row.stride(-1) != 1:
        row = row.contiguous()
    scales: dict[str, Tensor] = {}
    if not isinstance(key, Tensor):
        scales = {"key_scale": key.scale[..., 0], "value_scale": value.scale[..., 0]}
        key, value = key.q, value.q
    result = decode_attention(query[:, :, 0], key, value, row, scale=scale, sinks=sinks, **scales)
    return result.unsqueeze(1)


def _of_tokens(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor, scale: float) -> Tensor:
    batch, heads, tokens, _ = query.shape
    length = mask.shape[-1]
    bias = nn.functional.pad(_added(mask, query.dtype), (0, -length % _ROW_MULTIPLE))[..., :length]
    key, value = (states.repeat_interleave(heads // states.shape[1], 1) for states in (key, value))
    result, logarithm, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias.expand(batch, heads, -1, -1), True, 0.0, False, scale=scale
    )
    share = (logarithm[..., :tokens] - sinks.float().view(1, -1, 1)).sigmoid()
    shared: Tensor = (result * share.unsqueeze(-1)).to(query.dtype)
    return shared.transpose(1, 2)


def sink_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' ``sdpa_mask``, also where it is only causal."""
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    return mask


def models_with_sinks(model: nn.Module, left: dict[str, str]) -> list[tuple[nn.Module, str]]:
    """The transformers models in `model` that attend as GPT-OSS by ``eager``, and the name of the function that is to
    replace it; `left` gets those whose sinks are used otherwise."""
    # Of the models that share a configuration, the outermost decides.
    found = {id(m.config): (name, m) for name, m in reversed(list(model.named_modules())) if _attends_by_eager(m)}
    switched: list[tuple[nn.Module, str]] = []
    for name, each in found.values():
        kinds = {type(module) for module in each.modules()}
        if structure.attends_with_sinks(kinds) and structure.asks_for_sdpa(kinds) is None:
            switched.append((each, READS_STORED if structure.attends_to_what_is_stored(kinds) else NAME))
        elif any("s_aux=" in (structure.body_of(kind) or "") for kind in kinds):
            left[f"{name}.attention" if name else "attention"] = "attention with sinks of another form"
    return switched


def _attends_by_eager(module: Any) -> bool:
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != "eager":
        return False
    can_switch = getattr(type(module), "_can_set_attn_implementation", None)
    return can_switch is not None and bool(can_switch())
