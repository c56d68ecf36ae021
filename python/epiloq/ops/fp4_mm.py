"""Products of floating-point activations with FP4 weights: MXFP4 and NVFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq._torch.calls import (
    DENSE_PRODUCT,
    direct,
    expect_tensors,
    is_transformed,
    mark_written,
    refuse_batch_invariant,
    without_autocast,
)
from epiloq._torch.checks import Arguments, explanation_of
from epiloq._torch.dense import multiply_by_rows, multiply_dense, row_chunks
from epiloq._torch.library import Gradient, register_product
from epiloq.weights.fp4 import FLOATS, check_weight, dequantized_rows
from epiloq.weights.tensor_checks import check_memory, check_output_of, check_rows, described, refuse

_NAME = "fp4_mm"
_MOST_DIMENSIONS = 6
# Weights that are dequantised at once: 4 MiB of float32 on a CPU, which caches hold, and 64 MiB on a GPU.
_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}


def fp4_mm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    global_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ W.T + bias`` with ``W[n, k] = e2m1(codes[n, k]) * scale[n, k // block] * global_scale``.

    The type of ``scale`` determines the format: MXFP4 (E8M0, blocks of 32) or NVFP4 (E4M3, blocks of 16); see
    `epiloq.fp4_dequantize`. W is computed in float32, rounded once to x's dtype (without a global scale this is
    exact, unless a float16 overflows or is smaller than 2^-14) and multiplied by torch: a few rows at a time on the
    CPU, as a whole on CUDA. docs/numerics.md has the bounds. The gradient of x is ``dy @ W``.

    Args:
        x: ``[…, M, K]`` float16, bfloat16 or float32, contiguous rows; leading dimensions must collapse into one.
        codes: uint8 ``[N, ceil(K / 2)]``: an even column in the low half of a byte, an odd one in the high half.
        scale: uint8 or float8_e8m0fnu ``[N, ceil(K / 32)]``, or float8_e4m3fn ``[N, ceil(K / 16)]``.
        bias: ``[N]`` of x's dtype.
        global_scale: float32, one element, or ``[N]``: one for each row of W.
        out: ``[…, M, N]`` of x's dtype, contiguous rows, sharing no memory with inputs; written and returned.

    Returns:
        ``[…, M, N]`` of x's dtype. NaN in a token affects only that token's outputs, NaN in a scale only that column's.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass that needs a gradient of ``global_scale`` or ``scale``; only ``x`` and
            ``bias`` have gradients.
    """
    if direct((x, codes, scale), (bias, global_scale, out)):
        return run(x, codes, scale, global_scale, bias, out=out)
    optional = {"bias": bias, "global_scale": global_scale, "out": out}
    expect_tensors(_NAME, {"x": x, "codes": codes, "scale": scale}, optional, writes=out is not None)
    if out is None:
        if is_transformed():  # transforms do not compose with `register_autograd`
            weight = torch.ops.epiloq.fp4_dequantize(codes, scale, global_scale, x.shape[-1], x.dtype)
            return torch.nn.functional.linear(x, weight, bias)
        result: Tensor = torch.ops.epiloq.fp4_mm(x, codes, scale, global_scale, bias)
        return result
    torch.ops.epiloq.fp4_mm_out(x, codes, scale, global_scale, bias, out=out)
    return out


_Weight = tuple[Tensor, Tensor, "Tensor | None"]


@torch.no_grad()
def run(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`fp4_mm` for plain tensors."""
    refuse_batch_invariant(f"epiloq.{_NAME}", DENSE_PRODUCT)
    weight = (codes, scale, global_scale)
    result = _empty(x, codes) if out is None else out
    _check(result, x, weight, bias, out is not None)
    if result.numel() > 0:
        if x.is_cuda:
            _dense_product(result, x, weight, bias)
        else:
            k = x.shape[-1]
            multiply_by_rows(result, x, bias, _AT_ONCE["cpu"], lambda rows: dequantized_rows(*weight, k, x.dtype, rows))
    if out is not None:
        mark_written(out)
    return result


def _empty(x: Tensor, codes: Tensor) -> Tensor:
    if x.ndim == 0:
        refuse(_NAME, "x", "at least one dimension", "a scalar")
    if codes.ndim != 2:
        refuse(_NAME, "codes", "uint8 [N, ceil(K / 2)]", described(codes))
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _check(out: Tensor, x: Tensor, weight: _Weight, bias: Tensor | None, out_given: bool) -> None:
    codes, scale, global_scale = weight
    inputs = {"x": x, "codes": codes, "scale": scale, "global_scale": global_scale, "bias": bias}
    for name, tensor in inputs.items():
        if tensor is not None:
            check_memory(name, tensor, x.device, _NAME)
    if x.dtype not in FLOATS or not 1 <= x.ndim <= _MOST_DIMENSIONS:
        wanted = f"float32, float16 or bfloat16 with 1 to {_MOST_DIMENSIONS} dimensions"
        refuse(_NAME, "x", wanted, described(x))
    check_rows("x", x, _NAME)
    check_weight(*weight, x.shape[-1], _NAME)
    n = codes.shape[0]
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (n,) or not bias.is_contiguous()):
        refuse(_NAME, "bias", f"x's {x.dtype} [{n}], dense", described(bias))
    if out_given:
        check_output_of(x, out, n, inputs, _NAME)


def _dense_product(out: Tensor, x: Tensor, weight: _Weight, bias: Tensor | None) -> None:
    """Multiply on CUDA, with W dequantised to memory in x's dtype."""
    n, k = out.shape[-1], x.shape[-1]
    dense = x.new_empty((n, k))
    for rows in row_chunks(n, k, _AT_ONCE["cuda"]):
        dense[rows] = dequantized_rows(*weight, k, x.dtype, rows)
    multiply_dense(out, x, dense, bias)


@explanation_of(fp4_mm)
def explain(call: Arguments) -> str:
    x, scales, bias = call.x, (call.scale, call.global_scale), call.bias
    refuse_batch_invariant(f"epiloq.{_NAME}", DENSE_PRODUCT)
    optional = {"bias": bias, "global_scale": scales[1], "out": call.out}
    expect_tensors(_NAME, {"x": x, "codes": call.codes, "scale": scales[0]}, optional, writes=False)
    result = _empty(x, call.codes) if call.out is None else call.out
    _check(result, x, (call.codes, *scales), bias, call.out is not None)
    if result.numel() == 0:
        return "nothing to launch: the output is empty"
    where = "in memory" if x.is_cuda else "some rows at a time"
    return f"the weight dequantised to {str(x.dtype).removeprefix('torch.')}, {where}, then torch's product"


def _fake(x: Tensor, codes: Tensor, *_: Tensor | None) -> Tensor:
    return _empty(x, codes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, scale, global_scale, bias = inputs
    ctx.save_for_backward(codes, scale, global_scale)
    ctx.k, ctx.has_bias = x.shape[-1], bias is not None


def _pull(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    of_x, _, *of_scales, of_bias = ctx.needs_input_grad
    if any(of_scales):
        raise NotImplementedError(f"epiloq.{_NAME} has no gradient of scale or global_scale, only of x and bias")
    dx = dbias = None
    if of_x:
        with without_autocast(dy.device.type):
            dx = dy @ torch.ops.epiloq.fp4_dequantize(*ctx.saved_tensors, ctx.k, dy.dtype)
    if of_bias:
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0)
    return dx, None, None, None, dbias


_ARGUMENTS = "Tensor x, Tensor codes, Tensor scale, Tensor? global_scale, Tensor? bias"
register_product(_NAME, _ARGUMENTS, run, _fake, gradient=Gradient(_pull, _save))
