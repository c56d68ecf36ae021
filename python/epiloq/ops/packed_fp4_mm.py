"""Products of floating-point activations with packed FP4 weights: one matrix, or one per expert."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import (
    DENSE_PRODUCT,
    direct,
    expect_tensors,
    is_batch_invariant,
    is_transformed,
    mark_written,
    parts_of,
    refuse_batch_invariant,
    without_autocast,
)
from epiloq._torch.checks import Arguments, explanation_of
from epiloq._torch.dense import multiply_dense
from epiloq._torch.library import Gradient, register_product
from epiloq._torch.threads import threads_for
from epiloq.ops.checks.packed_fp4_mm import NAME, check, counts_of, experts_of
from epiloq.ops.experts import few_rows, matrices
from epiloq.ops.weight_only_mm import on_16_bytes
from epiloq.weights.packed_fp4_weight import PackedFp4Weight


def packed_fp4_mm(
    x: Tensor,
    weight: PackedFp4Weight,
    bias: Tensor | None = None,
    *,
    offs: Tensor | None = None,
    masked_m: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ W.T + bias`` with packed FP4 weights; with ``offs`` or ``masked_m``, each row times its expert's matrix.

    On CUDA, for 16-bit x with up to 64 rows (with experts: with as few as `grouped_packed_mm` says), a kernel reads
    the codes directly: code times scale is exact, and the fp32 sum is multiplied by the global scale. Nothing is
    read back to the host. On SM90 one matrix has such a kernel for more rows, too, of bfloat16 or for NVFP4.
    Otherwise W is dequantised as by `epiloq.fp4_dequantize`, rounded once to x's dtype, and multiplied by torch, one
    expert at a time, whose number of rows is read on the host. The CPU multiplies as the kernels do, one expert at a
    time. docs/numerics.md has the bounds. The gradient of x is ``dy @ W``. With batch invariance
    (`epiloq.set_batch_invariant`), and for experts in a CUDA graph, the kernel of few rows is used for any number.

    Args:
        x: ``[…, M, K]`` float16, bfloat16 or float32, contiguous rows, leading dimensions that collapse into one; with
            ``offs`` ``[M, K]``, rows sorted by expert; with ``masked_m`` ``[E, M, K]``.
        weight: ``[N, K]``, or ``[E N, K]``, the experts' matrices stacked, N a multiple of 16.
        bias: ``[N]`` of x's dtype; ``[E, N]`` with experts.
        offs: int32 ``[E]``, the ends of the experts' rows, ascending.
        masked_m: int32 ``[E]``, the number of valid rows of each expert.
        out: ``[…, M, N]`` of x's dtype, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, M, N]`` of x's dtype. Rows that belong to no expert are not written.

    Raises:
        ValueError: an argument is invalid, or both ``offs`` and ``masked_m`` are given.
        TypeError: an argument is not a tensor, or ``weight`` no `PackedFp4Weight`.
        NotImplementedError: with batch invariance, if there is no kernel (float32 on CUDA, bfloat16 on SM75).
    """
    if not isinstance(weight, PackedFp4Weight):
        raise TypeError(f"epiloq.{NAME}: weight: expected a PackedFp4Weight, got {type(weight).__name__}")
    w = weight
    arguments = (x, w.q, w.scale, w.global_scale, bias, offs, masked_m, w.format, w.n, w.k)
    if direct((x, w.q, w.scale), (w.global_scale, bias, offs, masked_m, out)):
        return run(*arguments, out=out)
    optional = {**parts_of(w, "global_scale"), "bias": bias, "offs": offs, "masked_m": masked_m, "out": out}
    expect_tensors(NAME, {"x": x, **parts_of(w, "q", "scale")}, optional, writes=out is not None)
    if out is None:
        if is_transformed() and counts_of(offs, masked_m) is None:  # transforms do not compose with `register_autograd`
            return torch.nn.functional.linear(x, w.dequantize(x.dtype), bias)
        result: Tensor = torch.ops.epiloq.packed_fp4_mm(*arguments)
        return result
    torch.ops.epiloq.packed_fp4_mm_out(*arguments, out=out)
    return out


@torch.no_grad()
def run(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    offs: Tensor | None,
    masked_m: Tensor | None,
    format: str,
    n: int,
    k: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`packed_fp4_mm` for plain tensors, with the weight's tensors as separate arguments."""
    weight, counts = PackedFp4Weight(q, scale, global_scale, format, n, k), counts_of(offs, masked_m)
    experts = experts_of(x, weight, counts, masked_m is not None)
    result = x.new_empty(*x.shape[:-1], n // experts) if out is None else out
    check(result, x, weight, bias, counts, out is not None)
    if result.numel() > 0 and not _by_kernel(result, x, weight, bias, counts):
        _refuse_dense(x)
        _one_by_one(result, x, weight, bias, counts)
    if out is not None:
        mark_written(out)
    return result


def _takes_kernel(x: Tensor, counts: Tensor | None, n: int, format: str) -> bool:
    """Whether to ask for a kernel that reads codes: because it is faster, for batch invariance, or because a CUDA graph
    is captured. On a CPU it is for one matrix. `n`: the rows of the matrices of all experts."""
    if counts is None or not x.is_cuda:
        return counts is None
    experts = counts.numel()
    return is_batch_invariant() or few_rows.takes_one_kernel(x, n // experts, experts, format=format)


def _refuse_dense(x: Tensor) -> None:
    """Raise NotImplementedError if a row's result could depend on other rows. Empty sums do not."""
    if x.is_cuda and x.shape[-1] > 0:
        refuse_batch_invariant(f"epiloq.{NAME}", DENSE_PRODUCT)


def _kernel_arguments(
    out: Tensor, x: Tensor, weight: PackedFp4Weight, bias: Tensor | None, counts: Tensor | None
) -> tuple[Any, ...]:
    x = on_16_bytes(x)
    if counts is None:
        rows = prod(x.shape[:-1])
        out, x = out.view(rows, out.shape[-1]), x.view(rows, x.shape[-1])
        bias = None if bias is None else bias.view(1, -1)
    global_scale = weight.global_scale if counts is None else matrices.each(weight.global_scale, counts.numel())
    of_weight = (weight.q, weight.scale, None, None, bias, global_scale)
    numbers = (weight.format, 4, weight.n, weight.k, weight.group_size)
    no_kernel_by_name = None
    masked = counts is not None and x.ndim == 3
    return (out, x, *of_weight, counts, masked, *numbers, no_kernel_by_name, threads_for(x))


def _by_kernel(out: Tensor, x: Tensor, weight: PackedFp4Weight, bias: Tensor | None, counts: Tensor | None) -> bool:
    if not _takes_kernel(x, counts, weight.n, weight.format):
        return False
    return _core.grouped_packed_mm(*_kernel_arguments(out, x, weight, bias, counts))


def _one_by_one(out: Tensor, x: Tensor, weight: PackedFp4Weight, bias: Tensor | None, counts: Tensor | None) -> None:
    if counts is None:
        rows = prod(x.shape[:-1])
        _product(out.view(rows, out.shape[-1]), x.reshape(rows, x.shape[-1]), weight, bias)
        return
    size = weight.n // counts.numel()
    for expert, place in matrices.places(NAME, counts, x):
        part = weight.row_slice(expert * size, (expert + 1) * size)
        _product(out[place], x[place], part, None if bias is None else bias[expert])


def _product(out: Tensor, x: Tensor, weight: PackedFp4Weight, bias: Tensor | None) -> None:
    """Rows ``[M, K]`` times one matrix; on CUDA it is dequantised as a whole."""
    if x.is_cuda:
        multiply_dense(out, x, weight.dequantize(x.dtype), bias)
    else:
        _by_kernel(out, x, weight, bias, None)


@explanation_of(packed_fp4_mm)
def explain(call: Arguments) -> str:
    x, weight, bias, offs, masked_m, out = call.x, call.weight, call.bias, call.offs, call.masked_m, call.out
    if not isinstance(weight, PackedFp4Weight):
        raise TypeError(f"epiloq.{NAME}: weight: expected a PackedFp4Weight, got {type(weight).__name__}")
    optional = {**parts_of(weight, "global_scale"), "bias": bias, "offs": offs, "masked_m": masked_m, "out": out}
    expect_tensors(NAME, {"x": x, **parts_of(weight, "q", "scale")}, optional, writes=False)
    counts = counts_of(offs, masked_m)
    experts = experts_of(x, weight, counts, masked_m is not None)
    result = x.new_empty((*x.shape[:-1], weight.n // experts)) if out is None else out
    check(result, x, weight, bias, counts, out is not None)
    if result.numel() == 0:
        return "nothing to launch: the output is empty"
    if _takes_kernel(x, counts, weight.n, weight.format):
        explanation = _core.explain_grouped_packed_mm(*_kernel_arguments(result, x, weight, bias, counts))
        if not explanation.startswith("no "):
            return explanation
    _refuse_dense(x)
    if x.is_cuda:
        text = dequantised_explanation(x.dtype)
    else:
        rows, size = x.flatten(0, -2), weight.n // experts
        part = rows.new_empty((len(rows), size)), rows, weight.row_slice(0, size)
        text = _core.explain_grouped_packed_mm(*_kernel_arguments(*part, None, None))
    return text if counts is None else f"one expert after the other: {text}"


def dequantised_explanation(dtype: torch.dtype) -> str:
    """What `explain` says of a weight that no kernel reads on CUDA."""
    return f"the weight dequantised to {str(dtype).removeprefix('torch.')}, in memory, then torch's product"


def _fake(x: Tensor, *rest: Any) -> Tensor:
    offs, masked_m, _, n, _ = rest[4:]
    counts = counts_of(offs, masked_m)
    return x.new_empty((*x.shape[:-1], n // (1 if counts is None else counts.shape[0])))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, q, scale, global_scale, _, offs, masked_m, *numbers = inputs
    ctx.save_for_backward(q, scale, global_scale, offs, masked_m)
    ctx.numbers, ctx.shape = numbers, x.shape


def _pull(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """``dy @ W`` for each expert's rows (rows of no expert have no gradient), and sums of rows for the bias."""
    q, scale, global_scale, offs, masked_m = ctx.saved_tensors
    of_x, _, _, of_factor, of_bias, *_ = ctx.needs_input_grad
    if of_factor:
        raise NotImplementedError(f"epiloq.{NAME} has no gradient of weight.global_scale, only of x and bias")
    weight, counts = PackedFp4Weight(q, scale, global_scale, *ctx.numbers), counts_of(offs, masked_m)
    dx = dbias = None
    if counts is None:
        if of_x:
            with without_autocast(dy.device.type):
                dx = dy @ weight.dequantize(dy.dtype)
        if of_bias:
            dbias = dy.reshape(-1, dy.shape[-1]).sum(0)
    else:
        dx, dbias = dy.new_zeros(ctx.shape), dy.new_zeros((counts.numel(), dy.shape[-1]))
        size = weight.n // counts.numel()
        for expert, place in matrices.places(NAME, counts, dx):
            part = weight.row_slice(expert * size, (expert + 1) * size)
            with without_autocast(dy.device.type):
                dx[place] = dy[place] @ part.dequantize(dy.dtype)
            dbias[expert] = dy[place].sum(0)
    return (dx if of_x else None, None, None, None, dbias if of_bias else None, *(None,) * 5)


register_product(
    NAME,
    "Tensor x, Tensor q, Tensor scale, Tensor? global_scale, Tensor? bias, Tensor? offs, Tensor? masked_m, str format, "
    "int n, int k",
    run,
    _fake,
    gradient=Gradient(_pull, _save),
)
