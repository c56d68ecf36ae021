"""Decode attention that reads keys and values once for all query heads that share them, also from a quantised cache.

transformers repeats keys and values for each query head if there is a mask, as with a static cache, and attention
kernels for many tokens use only a fraction of a GPU for a single one. `decode_attention` is used instead if each
sequence has one new token: with a quantised cache, and on a GPU with one of 16 bits. On a CPU torch's kernels are
faster, with the query heads of a key head as rows; on a GPU too if `decode_attention` has no kernel and there are more
than a few sequences. Several tokens at a time use transformers' own ``sdpa``, in graphs of ``torch.compile`` without a
mask where it would only be causal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from epiloq._torch.calls import is_batch_invariant
from epiloq._torch.tracing import is_exporting
from epiloq.ops.attention.decode_attention import decode_attention
from epiloq.ops.attention.decode_attention import run as run_decode_attention
from epiloq.optimize.guards import are_plain, wants_gradient
from epiloq.optimize.structure import asks_for_sdpa, attends_to_what_is_stored

NAME = "epiloq_sdpa"
# Elements of a head for which `decode_attention` has a kernel, and sequences up to which it is faster without one.
_KERNEL_WIDTHS = (64, 128, 256)
_FEW_SEQUENCES = 2
# As epiloq.kv_cache calls it, which needs transformers.
READS_STORED = "epiloq_sdpa_of_stored"
NAMES = (NAME, READS_STORED)
# Arguments that change scores: transformers' own function adds the first, and refuses the second.
_OF_SCORES = ("position_bias", "softcap")


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' convention: query ``[B, H, T, D]``, key and value ``[B, H / G, L, D]``, or `Stored`
    for a quantised cache; result ``[B, T, H, D]``. Unless T = 1, transformers' own ``sdpa`` is used."""
    is_stored = not isinstance(key, Tensor)
    plain = all(kwargs.get(name) is None for name in _OF_SCORES)
    if plain and _decodes(query, key, value, attention_mask):
        mask = None if attention_mask is None else attention_mask[:, 0, 0]
        if mask is not None and mask.stride(-1) != 1:
            mask = mask.contiguous()
        scales = (key.scale[..., 0], value.scale[..., 0]) if is_stored else (None, None)
        keys, values = (key.q, value.q) if is_stored else (key, value)
        result = decode_attention(
            query[:, :, 0], keys, values, mask, key_scale=scales[0], value_scale=scales[1], scale=scaling
        )
        return result.unsqueeze(1), None
    if is_stored:
        key, value = key.dequantize(), value.dequantize()
    if plain and _groups_heads(query, attention_mask):
        return _by_heads_of_keys(query, key, value, attention_mask, scaling, dropout), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


# Attribute of a mask with a view of its row of tokens, computed once for all layers of a model.
_ROW = "_epiloq_row"


def attend_plainly(
    module: nn.Module, query: Tensor, key: Any, value: Any, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """`grouped_sdpa` for one token of a plain query ``[B, 1, H, D]``, in eager mode and without gradients:
    ``[B, H, D]`` or ``[B, 1, H, D]``."""
    heads = query.transpose(1, 2)
    if not isinstance(key, Tensor) or not are_plain(key, value, mask):
        return grouped_sdpa(module, heads, key, value, mask, scaling=scaling)[0]
    if not _decodes(heads, key, value, mask):
        if _groups_heads(heads, mask):
            return _by_heads_of_keys(heads, key, value, mask, scaling, 0.0)
        return grouped_sdpa(module, heads, key, value, mask, scaling=scaling)[0]
    row = None if mask is None else _row_of(mask)
    if mask is not None and row is None:
        return grouped_sdpa(module, heads, key, value, mask, scaling=scaling)[0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return run_decode_attention(query.select(1, 0), key, value, row, None, None, scale)


def _row_of(mask: Tensor) -> Tensor | None:
    """The tokens ``[B, L]`` of a mask ``[B, 1, 1, L]``, as a view; None if they are not neighbours in memory."""
    row: Tensor | None = vars(mask).get(_ROW)
    if row is None or row.data_ptr() != mask.data_ptr() or row.shape[-1] != mask.shape[-1]:
        if mask.stride(-1) != 1:
            return None
        row = vars(mask)[_ROW] = mask[:, 0, 0]
    return row


def _groups_heads(query: Tensor, mask: Tensor | None) -> bool:
    """Whether the query heads of a key head can be rows of one product."""
    return query.shape[2] == 1 and (mask is None or mask.shape[1] == 1)


def _by_heads_of_keys(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float
) -> Tensor:
    """torch's ``sdpa`` of one token ``[B, H, 1, D]``, with the query heads of a key head as rows: ``[B, 1, H, D]``."""
    batch, heads, _, width = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, width)
    result = nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return result.reshape(batch, 1, heads, value.shape[-1])


def hold(dtype: torch.dtype, key: Any, value: Any) -> bool:
    """Whether keys and values, or the scales of `Stored` ones, have this type. ``torch.autocast`` mixes types."""
    key, value = (each if isinstance(each, Tensor) else each.scale for each in (key, value))
    return bool(key.dtype == dtype == value.dtype)


def _decodes(query: Tensor, key: Any, value: Any, mask: Tensor | None) -> bool:
    """Whether this is a decode step that `decode_attention` supports."""
    is_stored = not isinstance(key, Tensor)
    if not is_stored and not is_batch_invariant() and not _is_fast(query):
        return False
    if query.shape[2] != 1 or wants_gradient(query, *(() if is_stored else (key, value))):
        return False
    by_heads = mask is not None and (mask.dtype != torch.bool or mask.shape[1:3] != (1, 1))
    if by_heads or (mask is not None and mask.shape[-1] != (key.q if is_stored else key).shape[2]):
        return False
    return hold(query.dtype, key, value) and (is_stored or value.shape[-1] == query.shape[-1])


def _is_fast(query: Tensor) -> bool:
    """Whether `decode_attention` is faster than torch's ``sdpa`` on a cache of query's dtype."""
    has_kernel = query.shape[-1] in _KERNEL_WIDTHS and query.dtype != torch.float32
    return query.is_cuda and (has_kernel or query.shape[0] <= _FEW_SEQUENCES)


def causal_mask(q_length: int, kv_length: int, **arguments: Any) -> Tensor | None:
    """transformers' ``sdpa_mask``, which takes these arguments, but None in compiled graphs too if the mask is causal.

    With None, ``sdpa`` attends causally: it neither reads a mask nor computes the half that this hides, and does not
    repeat keys and values for query heads. transformers does so in eager mode, and while compiling from torch 2.14 on.
    """
    if is_compiling() and not is_exporting() and _is_causal(q_length, kv_length, **arguments):
        return None
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(q_length=q_length, kv_length=kv_length, **arguments)
    return mask


def _is_causal(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> bool:
    """Whether token i attends to tokens 0 to i: a prompt without padding, at the beginning of a cache, or without one.
    A static cache that is in use has a tensor as `q_offset`, whose value is not known while compiling."""
    first = isinstance(q_offset, int) and q_offset == 0
    whole = local_size is None or kv_length < local_size
    return allow_is_causal_skip and attention_mask is None and q_length > 1 and first and whole


def models_by_sdpa(model: nn.Module, left: dict[str, str]) -> list[tuple[nn.Module, str]]:
    """The transformers models in `model` that attend by ``sdpa``, and the name of the function that is to replace it;
    `left` gets why others are not among them. Models that attend in another way (``eager``, ``flash_attention_2``)
    keep it.

    If every layer passes the result of its cache directly to attention, a `QuantizedCache` returns its stored form.
    """
    # Of the models that share a configuration, the outermost decides.
    found = {id(m.config): (name, m) for name, m in reversed(list(model.named_modules())) if _attends_by_sdpa(m)}
    switched: list[tuple[nn.Module, str]] = []
    for name, each in found.values():
        kinds = {type(module) for module in each.modules()}
        asks = asks_for_sdpa(kinds)
        if asks is not None:
            left[f"{name}.attention" if name else "attention"] = f"{asks} does something else where it is called sdpa"
            continue
        switched.append((each, READS_STORED if attends_to_what_is_stored(kinds) else NAME))
    return switched


def _attends_by_sdpa(module: Any) -> bool:
    """Whether this is a transformers model that looks up its attention by name, now ``sdpa``."""
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != "sdpa":
        return False
    can_switch = getattr(type(module), "_can_set_attn_implementation", None)
    return can_switch is not None and module._supports_sdpa and can_switch()
