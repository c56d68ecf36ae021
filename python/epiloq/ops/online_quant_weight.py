"""Preparation of blockwise weights for `online_quant_mm`."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq._torch.calls import expect_tensors
from epiloq._torch.checks import expect_int32, is_int32
from epiloq.weights.block_quant_weight import RANGES, BlockQuantWeight, prepare, unpack_pairs
from epiloq.weights.tensor_checks import refuse

_NAME = "online_quant_weight"
# Largest number of products of magnitude at most 2^14 whose sum fits int32.
MAX_GROUP = 2**17 - 1


def online_quant_weight(
    w_q: Tensor,
    w_scale: Tensor,
    w_offset: Tensor | None = None,
    *,
    group_size: int,
    bits: int = 8,
    in_features: int | None = None,
) -> BlockQuantWeight:
    """Prepare the weight of `online_quant_mm` once: pad it, reorder it for the kernels and compute block sums.

    Args:
        w_q: int8 ``[N, K]``; with ``bits=4`` int8 ``[N, ceil(K / 2)]``, two values from -8 to 7 per byte, value 2i in
            the low half of byte i.
        w_scale, w_offset, group_size: as for `online_quant_mm`.
        in_features: K, for 4-bit weights of odd K.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    expect_tensors(_NAME, {"w_q": w_q, "w_scale": w_scale}, {"w_offset": w_offset}, writes=False)
    if not is_int32(bits) or bits not in RANGES:
        refuse(_NAME, "bits", "4 or 8", repr(bits))
    if not is_int32(group_size) or not 1 <= group_size <= MAX_GROUP:
        refuse(_NAME, "group_size", f"1 to {MAX_GROUP}", repr(group_size))
    if in_features is not None:
        expect_int32(_NAME, in_features=in_features)
        if in_features < 0:
            refuse(_NAME, "in_features", "at least 0", in_features)
    if w_q.dtype != torch.int8 or w_q.ndim != 2:
        refuse(_NAME, "w_q", "int8 with 2 dimensions", f"{w_q.dtype} {list(w_q.shape)}")
    values_a_byte = 8 // bits
    k = w_q.shape[1] * values_a_byte if in_features is None else in_features
    columns = -(-k // values_a_byte)
    if columns != w_q.shape[1]:
        refuse(_NAME, "w_q", f"{columns} columns for K = {k} at {bits} bits", w_q.shape[1])
    shape = (w_q.shape[0], -(-k // group_size))
    q = unpack_pairs(w_q, k) if bits == 4 else w_q
    scale = _spread("w_scale", w_scale, shape, w_q.device)
    offset = None if w_offset is None else _spread("w_offset", w_offset, shape, w_q.device)
    return prepare(q, scale, offset, group_size, bits)


def _spread(name: str, parameter: Tensor, shape: tuple[int, int], device: torch.device) -> Tensor:
    """[N, G] from [N, G], [N, 1], [1, G] or [1, 1]."""
    # Not `in (1, s)`: torch.compile finds a constant p in no tuple of symbolic sizes, though they are equal.
    fits = parameter.ndim == 2 and all(p == 1 or p == s for p, s in zip(parameter.shape, shape, strict=True))
    if parameter.dtype != torch.float32 or not fits or parameter.device != device:
        got = f"{parameter.dtype} {list(parameter.shape)} on {parameter.device}"
        refuse(_NAME, name, f"float32 {list(shape)} on {device}, or 1 for either size", got)
    return parameter.expand(shape)
