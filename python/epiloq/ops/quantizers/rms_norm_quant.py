"""RMS normalisation, optionally of a sum with a residual, fused with quantisation to int8 or FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, mark_written, refuse_backward
from epiloq._torch.checks import Arguments, as_number, explanation_of
from epiloq._torch.library import fake_out, register
from epiloq.ops.quantizers.outputs import empty_q, empty_scale, expect_measure


@overload
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    residual: None = ...,
    dtype: torch.dtype = ...,
    granularity: str = ...,
    group_size: int = ...,
    ue8m0: bool = ...,
    scale_layout: str = ...,
    pad_to: int = ...,
    out: tuple[Tensor, Tensor] | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    residual: Tensor,
    dtype: torch.dtype = ...,
    granularity: str = ...,
    group_size: int = ...,
    ue8m0: bool = ...,
    scale_layout: str = ...,
    pad_to: int = ...,
    out: tuple[Tensor, Tensor, Tensor] | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    scale_layout: str = "row",
    pad_to: int = 1,
    out: Any = None,
) -> Any:
    """The quantised ``r / sqrt(mean(r^2) + eps) * weight``, the mean over K; r is ``x``, or ``x + residual``.

    The sum is rounded to the dtype of ``x``, because it is returned as the next residual; everything from r to q is
    fp32, in one pass over memory. Scales are measured as by `quantize_int8` (symmetric) and `quantize_fp8`.

    CPU and GPU add squares in a different order: the scale is within 2^-20 of float64's, relatively, and q within one
    step of the value over that scale, for rows whose sum of squares float32 represents (for values from 1e19 on the
    norm is 0, as torch's). The returned sum has the same bits. Each device is deterministic.

    Args:
        x: ``[…, K]`` float32, float16 or bfloat16, contiguous rows.
        weight: ``[K]`` of that dtype.
        eps: added to the mean of the squares.
        residual: of ``x``'s shape and dtype.
        dtype: torch.int8, per token, or torch.float8_e4m3fn.
        granularity: what shares a scale: "token", or "group" of ``group_size`` columns (FP8).
        group_size, ue8m0, scale_layout, pad_to: as for `quantize_fp8`.
        out: ``(q, scale)``, or with a residual ``(q, scale, residual_out)``, to write into and return; ``residual_out``
            may be ``residual`` itself, which is then updated in place.

    Returns:
        ``(q, scale)``; with a residual ``(q, scale, x + residual)``.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass; the operation has no derivative.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    expect_measure("rms_norm_quant", dtype, granularity, group_size, ue8m0, scale_layout, pad_to)
    eps = as_number("rms_norm_quant", "eps", eps)
    if out is not None:
        _write_into(x, weight, eps, residual, out, granularity, group_size, ue8m0)
        return out
    measure = (granularity, group_size, ue8m0, scale_layout, dtype, pad_to)
    if direct((x, weight), (residual,)):
        return run(x, weight, eps, residual, *measure)
    required: dict[str, Any] = {"x": x, "weight": weight}
    if residual is None:
        expect_tensors("rms_norm_quant", required, {}, writes=False)
        results = torch.ops.epiloq.rms_norm_quant(x, weight, eps, *measure)
    else:
        expect_tensors("rms_norm_quant", {**required, "residual": residual}, {}, writes=False)
        results = torch.ops.epiloq.rms_norm_quant_add(x, weight, eps, residual, *measure)
    return tuple(refuse_backward("rms_norm_quant", result) for result in results)


def run(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, *measure: Any) -> tuple[Tensor, ...]:
    """`rms_norm_quant` for plain tensors; `measure` is granularity, group_size, ue8m0, scale_layout, dtype, pad_to."""
    made = _empty(x, weight, eps, residual, *measure)
    total = made[2] if len(made) > 2 else None
    _core.rms_norm_quant(made[0], x, weight, made[1], residual, total, eps, *measure[:3])
    return made


def _write_into(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    out: tuple[Tensor, ...],
    granularity: str,
    group_size: int,
    ue8m0: bool,
) -> None:
    if len(out) != (2 if residual is None else 3):
        wanted = "(q, scale)" if residual is None else "(q, scale, residual_out)"
        raise ValueError(f"epiloq.rms_norm_quant: out: expected {wanted}, got {len(out)} elements")
    q, scale, residual_out = out[0], out[1], out[2] if residual is not None else None
    arguments = (x, weight, eps, residual, q, scale, residual_out, granularity, group_size, ue8m0)
    if direct((x, weight, q, scale), (residual, residual_out)):
        return _run_into(*arguments)
    tensors = {"x": x, "weight": weight, "out": q, "scale": scale}
    optional = {"residual": residual, "residual_out": residual_out}
    expect_tensors("rms_norm_quant", tensors, optional, writes=True)
    torch.ops.epiloq.rms_norm_quant_out(*arguments)


def _run_into(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, *rest: Any) -> None:
    q, scale, residual_out, *measure = rest
    _core.rms_norm_quant(q, x, weight, scale, residual, residual_out, eps, *measure)
    mark_written(q, scale, residual_out)


def _empty(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    granularity: str,
    group_size: int,
    ue8m0: bool,
    scale_layout: str,
    dtype: torch.dtype,
    pad_to: int,
) -> tuple[Tensor, ...]:
    """Uninitialised results: q, its scale and, with a residual, the sum."""
    columns = x.shape[-1] if x.ndim else 0
    q = empty_q("rms_norm_quant", x, dtype, columns, pad_to)
    scale = empty_scale(x, columns, granularity, group_size, scale_layout)
    return (q, scale) if residual is None else (q, scale, x.new_empty(*x.shape))


def _without_residual(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, weight, eps, *measure: function(x, weight, eps, None, *measure)


@explanation_of(rms_norm_quant)
def explain(call: Arguments) -> str:
    x, weight, residual, out = call.x, call.weight, call.residual, call.out
    groups = call.granularity, call.group_size, call.ue8m0
    expect_measure("rms_norm_quant", call.dtype, *groups, call.scale_layout, call.pad_to)
    eps = as_number("rms_norm_quant", "eps", call.eps)
    expect_tensors("rms_norm_quant", {"x": x, "weight": weight}, {"residual": residual}, writes=False)
    if out is None:
        out = _empty(x, weight, eps, residual, *groups, call.scale_layout, call.dtype, call.pad_to)
    q, scale, residual_out = out[0], out[1], out[2] if residual is not None else None
    return _core.explain_rms_norm_quant(q, x, weight, scale, residual, residual_out, eps, *groups)


_MEASURE = "str granularity, int group_size, bool ue8m0"
_NEW = f"{_MEASURE}, str scale_layout, ScalarType dtype, int pad_to"
for _schema, _function, _shapes in (
    (
        f"rms_norm_quant(Tensor x, Tensor weight, float eps, {_NEW}) -> (Tensor, Tensor)",
        _without_residual(run),
        _without_residual(_empty),
    ),
    (
        f"rms_norm_quant_add(Tensor x, Tensor weight, float eps, Tensor residual, {_NEW}) -> (Tensor, Tensor, Tensor)",
        run,
        _empty,
    ),
    (
        "rms_norm_quant_out(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor(a!) q, Tensor(b!) scale,"
        f" Tensor(c!)? residual_out, {_MEASURE}) -> ()",
        _run_into,
        fake_out,
    ),
):
    register("rms_norm_quant", _schema, _function, _shapes)
