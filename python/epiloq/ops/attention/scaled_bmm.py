"""Batched int8 and FP8 matrix multiplication with scales and optional int8 output, for attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, dispatched, expect_tensors, mark_written
from epiloq._torch.checks import bound_arguments
from epiloq._torch.library import register_product
from epiloq._torch.threads import threads_for
from epiloq.weights.tensor_checks import refuse

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)
_OPERANDS = "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? scale_out=None"


def scaled_bmm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_out: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``scale_a * scale_b * (a[i] @ b[i])`` for each i of a batch, in one launch, with the arithmetic of `scaled_mm`.

    With ``out_dtype=torch.int8`` the result is divided by ``scale_out``, rounded to nearest, ties to even, and
    saturated to [-128, 127]; NaN, which only scales can cause, becomes 0. Nothing is copied: batches and rows may have
    any strides, so the heads of ``[tokens, heads, width]`` are ``x.transpose(0, 1)``, and ``a`` and ``b`` may be
    expanded (stride 0), such as keys and values shared by several heads. All must be 16-byte aligned.

    Args:
        a: int8 or float8 (e4m3fn, e5m2) ``[B, M, K]``, contiguous rows.
        b: ``[B, K, N]`` of ``a``'s kind, contiguous columns: ``rows.transpose(1, 2)`` of ``[B, N, K]``.
        scale_a: float32: one element, ``[B, 1, 1]``, or ``[B, M, 1]`` with the scales of adjacent rows adjacent in
            memory.
        scale_b: float32: one element, ``[B, 1, 1]``, or ``[B, 1, N]`` likewise.
        out_dtype: float16 or bfloat16, on the CPU also float32; int8 (for int8 operands) with ``scale_out``; ``out``'s
            dtype if ``out`` is given.
        scale_out: float32, one element: the scale of an int8 output.
        out: ``[B, M, N]``, contiguous rows, batches and rows not overlapping, sharing no memory with inputs; written
            and returned.

    Returns:
        ``[B, M, N]``, as accurate as `scaled_mm`; int8 outputs have the same bits on CPU and GPU.

    Raises:
        ValueError: an argument is invalid; the message names it. ``B`` is at most 65535, and for int8 ``K`` at most
            131071, where int32 stays exact.
        TypeError: an argument is not a tensor.
        NotImplementedError: as for `scaled_mm`.
    """
    if not direct((a, b, scale_a, scale_b), (scale_out, out)):
        required = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
        optional = {"scale_out": scale_out, "out": out}
        return dispatched("scaled_bmm", required, optional, (a, b, scale_a, scale_b, scale_out), out_dtype=out_dtype)
    return _run(a, b, scale_a, scale_b, scale_out, out_dtype=out_dtype, out=out)


def _empty(a: Tensor, b: Tensor, scale_out: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if out_dtype not in _OUT_DTYPES:
        refuse("scaled_bmm", "out_dtype", "torch.bfloat16, float16, float32 or int8", repr(out_dtype))
    if (out_dtype == torch.int8) != (scale_out is not None):
        expected = "a scale with an int8 output" if scale_out is None else "none with an output that is not int8"
        refuse("scaled_bmm", "scale_out", expected, f"out_dtype {out_dtype!r}")
    # Shapes are checked with everything else, once, in C++; here they only must not break the allocation.
    return a.new_empty((*a.shape[:-1], *b.shape[-1:]), dtype=out_dtype)


def _run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale_out: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    result = _empty(a, b, scale_out, out_dtype) if out is None else out
    call = (result, a, b, scale_a, scale_b, scale_out)
    if a.is_cuda:
        _core.scaled_bmm(*call)
    else:
        _core.scaled_bmm_on_host(*call, threads_for(a))
    if out is not None:
        mark_written(out)
    return result


def explain(*args: Any, **kwargs: Any) -> str:
    """`epiloq.explain` for `scaled_bmm`, given the arguments of a call."""
    call = bound_arguments(scaled_bmm, *args, **kwargs)
    out, out_dtype = call.pop("out"), call.pop("out_dtype")
    required = {key: call[key] for key in ("a", "b", "scale_a", "scale_b")}
    expect_tensors("scaled_bmm", required, {"scale_out": call["scale_out"], "out": out}, writes=False)
    if out is None:
        out = _empty(call["a"], call["b"], call["scale_out"], out_dtype)
    return _core.explain_scaled_bmm(out, **call)


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale_out: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    if a.ndim != 3 or b.ndim != 3:
        refuse("scaled_bmm", "b", "[B, K, N] with a [B, M, K]", f"{b.ndim} and {a.ndim} dimensions")
    for dimension, of_a in ((0, 0), (1, 2)):
        torch._check_value(
            a.shape[of_a] == b.shape[dimension],
            lambda: f"epiloq.scaled_bmm: b: expected [{a.shape[0]}, {a.shape[2]}, N], got {list(b.shape)}",
        )
    return _empty(a, b, scale_out, out_dtype)


register_product("scaled_bmm", _OPERANDS, _run, _fake, "ScalarType out_dtype")
