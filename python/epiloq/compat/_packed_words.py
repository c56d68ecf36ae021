"""vLLM's AWQ and GPTQ products: weights in other layouts, packed once and cached as long as their tensors exist.

``epiloq.formats`` is imported on first use, because ``import epiloq`` imports this module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import epiloq
from epiloq.compat._checks import HALF_DTYPES, require_dtype, require_matrix
from epiloq.weights.packed.checks import checked_perm
from epiloq.weights.packed_weight import PackedWeight


class _Kept(NamedTuple):
    """A packed weight, and its source: the tensors, their meaning, their addresses and versions."""

    references: list[weakref.ref[Tensor]]
    seen: tuple[object, ...]
    weight: PackedWeight


_kept: dict[int, _Kept] = {}
"""Prepared weights by ``id`` of the tensor of words."""


def awq_gemm(input: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor, split_k_iters: int) -> Tensor:
    """``input @ W``, ``[M, N]`` of input's dtype, summed in fp32, with ``W = (q - z) * s`` of AutoAWQ's ``gemm`` words.

    `input` float16 or bfloat16 [M, K]; `qweight` int32 [K, N / 8]; `scales` of input's dtype [G, N]; `qzeros` int32
    [G, N / 8], groups of K / G. `split_k_iters`, a parameter of vLLM's kernel, is ignored.

    The weight is packed on the first call, which takes as long as many products and synchronises, and is cached while
    `qweight` exists, which doubles the memory. It is packed again if one of the tensors is replaced, has another
    address or was written to through torch. After writes that torch does not count (to ``.data``, or by other
    kernels) call `forget_weights`. Tensors created under ``torch.inference_mode`` count no writes and are packed on
    every call.
    """
    operation = "awq_gemm"
    _check_activations(operation, input)
    weight = _packed((qweight, scales, qzeros), ("awq",), lambda: _awq(operation, qweight, scales, qzeros))
    return epiloq.weight_only_mm(input, weight)


def awq_dequantize(qweight: Tensor, scales: Tensor, zeros: Tensor, split_k_iters: int, thx: int, thy: int) -> Tensor:
    """Dequantise the weight of `awq_gemm` to ``[K, N]`` of the scales' dtype, each element rounded once.

    Nothing is cached. `split_k_iters`, `thx` and `thy`, vLLM's launch parameters, are ignored.
    """
    return _awq("awq_dequantize", qweight, scales, zeros).dequantize(scales.dtype).t().contiguous()


def gptq_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_gptq_qzeros: Tensor,
    b_gptq_scales: Tensor,
    b_g_idx: Tensor,
    use_exllama: bool,
    use_v2_format: bool,
    bit: int,
) -> Tensor:
    """``a @ W``, ``[M, N]`` of a's dtype, summed in fp32, with ``W = (q - z) * s`` of GPTQ's words.

    `a` float16 or bfloat16 [M, K]; `b_q_weight` int32 [K bit / 32, N]; `b_gptq_qzeros` int32 [G, N bit / 32], stored
    minus one unless `use_v2_format`; `b_gptq_scales` [G, N]; `bit` 2, 3, 4 or 8.

    Without `use_exllama` words are as in files, and `b_g_idx` int32 [K] is the group of each channel. With it they
    were reordered by `gptq_shuffle`, and `b_g_idx` is the order of channels that it was given. If empty or on "meta",
    channels are in order, in groups of K / G.

    The weight is packed on the first call and cached, as for `awq_gemm`.
    """
    operation = "gptq_gemm"
    _check_activations(operation, a)
    order = None if b_g_idx.is_meta or b_g_idx.numel() == 0 else b_g_idx
    tensors = (b_q_weight, b_gptq_qzeros, b_gptq_scales, *(() if order is None else (order,)))
    weight = _packed(
        tensors,
        ("gptq", use_exllama, use_v2_format, bit),
        lambda: _gptq(b_q_weight, b_gptq_qzeros, b_gptq_scales, order, use_exllama, use_v2_format, bit),
    )
    return epiloq.weight_only_mm(a, weight)


def gptq_shuffle(q_weight: Tensor, q_perm: Tensor, bit: int) -> None:
    """Reorder the words of a GPTQ file, int32 [K bit / 32, N], in place for ``use_exllama``.

    `q_perm` int32 [K]: channel j becomes the former channel q_perm[j]; empty or on "meta" for no permutation. In each
    word, even channels go to the lower half and odd ones to the upper half (3 bits: in each group of three words).
    """
    from epiloq.formats.layouts import exllama, words

    require_matrix("gptq_shuffle", q_weight=q_weight)
    require_dtype("gptq_shuffle", (torch.int32,), q_weight=q_weight)
    columns = _columns("gptq_shuffle", "q_weight", q_weight, bit)
    values = words.unpack(q_weight.t(), bit, columns)
    if not (q_perm.is_meta or q_perm.numel() == 0):
        values = values[:, checked_perm(q_perm, columns, q_weight.device, "gptq_shuffle")]
    q_weight.copy_(exllama.pack(values, bit).t())


def forget_weights() -> None:
    """Drop all weights cached by `awq_gemm` and `gptq_gemm`."""
    _kept.clear()


def _check_activations(operation: str, x: Tensor) -> None:
    require_matrix(operation, input=x)
    require_dtype(operation, HALF_DTYPES, input=x)


def _columns(operation: str, name: str, words_: Tensor, bit: int) -> int:
    """K of words packed along it."""
    from epiloq.formats.layouts import words

    if bit not in words.BITS:
        raise ValueError(f"{operation}: bit: expected one of {words.BITS}, got {bit}")
    columns = words_.shape[0] * 32 // bit
    if columns % words.period(bit):
        raise ValueError(f"{operation}: {name}: expected whole words of {bit} bits, got {list(words_.shape)}")
    return columns


def _group_size(operation: str, columns: int, scales: Tensor) -> int:
    require_matrix(operation, scales=scales)
    if scales.shape[0] == 0 or columns % scales.shape[0]:
        raise ValueError(f"{operation}: scales: expected groups that divide K = {columns}, got {list(scales.shape)}")
    return columns // scales.shape[0]


def _awq(operation: str, qweight: Tensor, scales: Tensor, qzeros: Tensor) -> PackedWeight:
    from epiloq.formats.layouts import awq

    require_matrix(operation, qweight=qweight)
    group_size = _group_size(operation, qweight.shape[0], scales)
    return awq.to_packed(qweight, qzeros, scales, group_size=group_size)


def _gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, use_exllama: bool, v2: bool, bit: int
) -> PackedWeight:
    from epiloq.formats.layouts import exllama, gptq, words

    require_matrix("gptq_gemm", b_q_weight=qweight)
    columns = _columns("gptq_gemm", "b_q_weight", qweight, bit)
    group_size = _group_size("gptq_gemm", columns, scales)
    version, order = "gptq_v2" if v2 else "gptq", None
    if use_exllama:
        qweight = words.pack(exllama.unpack(qweight.t(), bit, columns), bit).t()
        order, g_idx = g_idx, None
    packed = gptq.to_packed(qweight, qzeros, scales, g_idx, group_size=group_size, bits=bit, checkpoint_format=version)
    if order is None:
        return packed
    return replace(packed, perm=checked_perm(order, columns, packed.device, "gptq_gemm"))


def _packed(tensors: tuple[Tensor, ...], how: tuple[object, ...], make: Callable[[], PackedWeight]) -> PackedWeight:
    """The packed weight for these tensors, from the cache if possible; dropped when the first tensor is."""
    if any(tensor.is_inference() for tensor in tensors):
        return make()
    first, seen = tensors[0], (*how, *((tensor.data_ptr(), tensor._version) for tensor in tensors))
    kept = _kept.get(id(first))
    if kept and kept.seen == seen and all(r() is t for r, t in zip(kept.references, tensors, strict=True)):
        return kept.weight
    weight = make()
    # Called when `first` goes, before another object can have its id.
    references = [weakref.ref(first, partial(_forget, id(first))), *map(weakref.ref, tensors[1:])]
    _kept[id(first)] = _Kept(references, seen, weight)
    return weight


def _forget(key: int, _: object) -> None:
    _kept.pop(key, None)
