"""The gated activation of a SwiGLU layer, fused with quantisation to int8 or FP8."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, mark_written, refuse_backward
from epiloq._torch.checks import Arguments, explanation_of
from epiloq._torch.library import fake_out, register
from epiloq.ops.quantizers.gate import GATE, for_operator, gate_numbers
from epiloq.ops.quantizers.outputs import empty_q, empty_scale, expect_measure


def silu_and_mul_quant(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.int8,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    scale_layout: str = "row",
    pad_to: int = 1,
    alpha: float = 1.0,
    limit: float = math.inf,
    offset: float = 0.0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The quantised ``silu(x[…, :K]) * x[…, K:]``, where ``silu(g) = g / (1 + exp(-g))``.

    With options ``g * sigmoid(alpha * g) * (u + offset)`` as `silu_and_mul`, for contiguous halves.

    Everything from ``x`` to q is fp32, in one pass over memory. Scales are measured as by `quantize_int8` (symmetric)
    and `quantize_fp8`. Exponentials differ in their last bits between CPU and GPU: the scale is within 2^-20 of
    float64's, relatively, and q within one step of the value over that scale; an ``alpha`` that is no power of two adds
    ``2^-24 |alpha g|`` to the relative error of the scale, g being the gate of the largest value. Where
    ``alpha g`` is below -88 a value counts as 0, as in `silu_and_mul`. Each device is deterministic.

    Args:
        x: ``[…, 2 K]`` float32, float16 or bfloat16, contiguous rows: the output of a fused gate and up projection.
        dtype: torch.int8, per token, or torch.float8_e4m3fn.
        granularity: what shares a scale: "token", or "group" of ``group_size`` columns (FP8).
        group_size, ue8m0, scale_layout, pad_to: as for `quantize_fp8`.
        alpha, limit, offset: as for `silu_and_mul`.
        out: ``(q, scale)`` to write into and return.

    Returns:
        ``(q, scale)``, q ``[…, K']``, scale ``[…, 1]`` or ``[…, ceil(K / g)]``.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass; the operation has no derivative.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    expect_measure("silu_and_mul_quant", dtype, granularity, group_size, ue8m0, scale_layout, pad_to)
    gate = gate_numbers("silu_and_mul_quant", alpha, limit, offset)
    if out is not None:
        if len(out) != 2:
            raise ValueError(f"epiloq.silu_and_mul_quant: out: expected (q, scale), got {len(out)} elements")
        arguments = (x, *out, granularity, group_size, ue8m0)
        if direct((x, *out)):
            _run_into(*arguments, *gate)
        else:
            expect_tensors("silu_and_mul_quant", {"x": x, "out": out[0], "scale": out[1]}, {}, writes=True)
            torch.ops.epiloq.silu_and_mul_quant_out(*arguments, *for_operator(*gate))
        return out
    measure = (x, granularity, group_size, ue8m0, scale_layout, dtype, pad_to)
    if direct((x,)):
        return run(*measure, *gate)
    expect_tensors("silu_and_mul_quant", {"x": x}, {}, writes=False)
    q, scale = torch.ops.epiloq.silu_and_mul_quant(*measure, *for_operator(*gate))
    return refuse_backward("silu_and_mul_quant", q), refuse_backward("silu_and_mul_quant", scale)


def _run_into(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    granularity: str,
    group_size: int,
    ue8m0: bool,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> None:
    limit = math.inf if limit is None else limit
    _core.silu_and_mul_quant(q, x, scale, granularity, group_size, ue8m0, alpha, limit, offset)
    mark_written(q, scale)


def _empty(
    x: Tensor,
    granularity: str,
    group_size: int,
    ue8m0: bool,
    scale_layout: str,
    dtype: torch.dtype,
    pad_to: int,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    columns = x.shape[-1] // 2 if x.ndim else 0
    q = empty_q("silu_and_mul_quant", x, dtype, columns, pad_to)
    return q, empty_scale(x, columns, granularity, group_size, scale_layout)


def run(
    x: Tensor,
    granularity: str,
    group_size: int,
    ue8m0: bool,
    scale_layout: str,
    dtype: torch.dtype,
    pad_to: int,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    q, scale = _empty(x, granularity, group_size, ue8m0, scale_layout, dtype, pad_to)
    limit = math.inf if limit is None else limit
    _core.silu_and_mul_quant(q, x, scale, granularity, group_size, ue8m0, alpha, limit, offset)
    return q, scale


@explanation_of(silu_and_mul_quant)
def explain(call: Arguments) -> str:
    groups = call.granularity, call.group_size, call.ue8m0
    gate = gate_numbers("silu_and_mul_quant", call.alpha, call.limit, call.offset)
    expect_measure("silu_and_mul_quant", call.dtype, *groups, call.scale_layout, call.pad_to)
    expect_tensors("silu_and_mul_quant", {"x": call.x}, {}, writes=False)
    q, scale = call.out or _empty(call.x, *groups, call.scale_layout, call.dtype, call.pad_to)
    return _core.explain_silu_and_mul_quant(q, call.x, scale, *groups, *gate)


_MEASURE = "str granularity, int group_size, bool ue8m0"
for _schema, _function, _shapes in (
    (
        f"(Tensor x, {_MEASURE}, str scale_layout, ScalarType dtype, int pad_to, {GATE}) -> (Tensor, Tensor)",
        run,
        _empty,
    ),
    (f"_out(Tensor x, Tensor(a!) q, Tensor(b!) scale, {_MEASURE}, {GATE}) -> ()", _run_into, fake_out),
):
    register("silu_and_mul_quant", f"silu_and_mul_quant{_schema}", _function, _shapes)
