"""FP8 quantisation: static or dynamic scales per tensor, token, group along K, or block of a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, mark_written, refuse_backward
from epiloq._torch.checks import Arguments, as_number, expect_flags, explanation_of
from epiloq._torch.library import fake_out, register
from epiloq.ops.quantizers.outputs import empty_q, empty_scale, expect_choice, expect_layout

_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_GRANULARITIES = ("tensor", "token", "group", "block")


def quantize_fp8(
    x: Tensor,
    *,
    granularity: str = "tensor",
    group_size: int = 128,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    eps: float = 0.0,
    ue8m0: bool = False,
    scale_layout: str = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
    pad_to: int = 1,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``q = round(clamp(x / scale, -largest, largest))``, a true division, ties to even; the same bits on CPU and GPU.

    ``largest`` is 448 for e4m3fn and 57344 for e5m2. Without ``scale``, ``scale = max(min(amax, scale_ub), eps) /
    largest`` is measured, at least 2^-126, so that zeros give zeros.

    NaN makes its scale and everything that shares it NaN; an infinity makes its scale infinite, itself NaN and the
    others 0: everything computed from either is NaN, as in floating point. (``scale_ub`` bounds infinities.) With a
    static scale NaN stays NaN, the code 0x7f, and infinities saturate.

    Args:
        x: ``[…, K]`` float32, float16 or bfloat16, contiguous rows; ``[N, K]`` for "block".
        granularity: what shares a scale: "tensor"; "token", a row of ``x``; "group", ``group_size`` elements of a row;
            "block", ``group_size`` x ``group_size`` elements. The last group or block of a row may be shorter. The
            default is the tensor, as FP8's exponents span its range; `quantize_int8`'s is the token.
        group_size: of groups and blocks.
        scale: static scales, float32, in the shape of the returned scale below. Returned unchanged.
        scale_ub: dynamic: float32, one element, an upper bound of the measured amax, even if that is infinite; larger
            values saturate. Not validated: NaN bounds nothing, and below 0 everything saturates.
        eps: dynamic: a lower bound of amax.
        ue8m0: dynamic: scales are rounded up to powers of two.
        scale_layout: "column", for groups: column-major scales with strides ``(1, round_up(M, 4))`` for M rows, which
            TMA can load. Nothing is written between M and the next multiple of 4.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        pad_to: pads q's columns with zeros to a multiple of this (16 for matrix products).
        out: ``(q, scale)`` to write into and return, with their dtype and layout; with a static scale, that same
            tensor. Columns of q beyond K are set to 0, with or without ``pad_to``.

    Returns:
        ``q`` of ``dtype`` ``[…, K']`` and ``scale`` float32: ``[1]`` for the tensor, ``[…, 1]`` for tokens,
        ``[…, ceil(K / g)]`` for groups, ``[ceil(N / g), ceil(K / g)]`` for blocks. Given tensors may flatten the rows:
        ``[M]`` or ``[M, 1]`` for tokens, ``[M, ceil(K / g)]`` for groups.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass; the operation has no derivative.

    Source: the granularities of DeepSeek-V3 (1 x 128 activations, 128 x 128 weights), the scales of vLLM.
    """
    _expect(granularity, group_size, scale, scale_ub, eps, ue8m0, scale_layout, dtype, pad_to, out)
    is_static = scale is not None
    if out is not None:
        q, out_scale = out
        arguments = (x, q, out_scale, granularity, group_size, scale_ub, eps, ue8m0, is_static)
        if direct((x, q, out_scale), (scale_ub,)):
            _run_into(*arguments)
        else:
            tensors = {"x": x, "out": q, "scale": out_scale}
            expect_tensors("quantize_fp8", tensors, {"scale_ub": scale_ub}, writes=True)
            torch.ops.epiloq.quantize_fp8_out(*arguments)
        return out
    if scale is not None:
        if direct((x, scale)):
            return _static(x, scale, granularity, group_size, dtype, pad_to), scale
        expect_tensors("quantize_fp8", {"x": x, "scale": scale}, {}, writes=False)
        q = torch.ops.epiloq.quantize_fp8_static(x, scale, granularity, group_size, dtype, pad_to)
        return refuse_backward("quantize_fp8", q), scale
    measured = (x, granularity, group_size, scale_ub, eps, ue8m0, scale_layout, dtype, pad_to)
    if direct((x,), (scale_ub,)):
        return _dynamic(*measured)
    expect_tensors("quantize_fp8", {"x": x}, {"scale_ub": scale_ub}, writes=False)
    q, scale = torch.ops.epiloq.quantize_fp8_dynamic(*measured)
    return refuse_backward("quantize_fp8", q), refuse_backward("quantize_fp8", scale)


def _expect(
    granularity: str,
    group_size: int,
    scale: Tensor | None,
    scale_ub: Tensor | None,
    eps: float,
    ue8m0: bool,
    scale_layout: str,
    dtype: torch.dtype,
    pad_to: int,
    out: tuple[Tensor, Tensor] | None,
) -> None:
    """Check arguments against each other; C++ checks the tensors."""
    error = "epiloq.quantize_fp8: "
    expect_choice("quantize_fp8", "granularity", granularity, _GRANULARITIES)
    expect_choice("quantize_fp8", "dtype", dtype, _FORMATS)
    expect_layout("quantize_fp8", granularity, group_size, scale_layout, pad_to)
    expect_flags("quantize_fp8", ue8m0=ue8m0)
    eps = as_number("quantize_fp8", "eps", eps)
    if scale is not None:
        for argument, given in (("scale_ub", scale_ub is not None), ("eps", eps != 0), ("ue8m0", ue8m0)):
            if given:
                raise ValueError(f"{error}{argument}: expected none with a static scale, which is used as is, got one")
    if out is not None:
        if len(out) != 2:
            raise ValueError(f"{error}out: expected (q, scale), got {len(out)} elements")
        if scale is not None and out[1] is not scale:
            raise ValueError(f"{error}out: expected the given scale as its last, got another")


def _empty_q(x: Tensor, dtype: torch.dtype, pad_to: int, granularity: str) -> Tensor:
    q = empty_q("quantize_fp8", x, dtype, x.shape[-1] if x.ndim else 0, pad_to)
    if granularity == "block" and x.ndim != 2:
        raise ValueError(f"epiloq.quantize_fp8: x: expected two dimensions for granularity block, got {list(x.shape)}")
    return q


def _run_into(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    granularity: str,
    group_size: int,
    scale_ub: Tensor | None,
    eps: float,
    ue8m0: bool,
    is_static: bool,
) -> None:
    _core.quantize_fp8(q, x, scale, granularity, group_size, is_static, ue8m0, eps, scale_ub)
    mark_written(q, None if is_static else scale)


def _empty_dynamic(
    x: Tensor,
    granularity: str,
    group_size: int,
    scale_ub: Tensor | None,
    eps: float,
    ue8m0: bool,
    scale_layout: str,
    dtype: torch.dtype,
    pad_to: int,
) -> tuple[Tensor, Tensor]:
    return _empty_q(x, dtype, pad_to, granularity), empty_scale(x, x.shape[-1], granularity, group_size, scale_layout)


def _dynamic(x: Tensor, *measure: Any) -> tuple[Tensor, Tensor]:
    q, scale = _empty_dynamic(x, *measure)
    granularity, group_size, scale_ub, eps, ue8m0, *_ = measure
    _core.quantize_fp8(q, x, scale, granularity, group_size, False, ue8m0, eps, scale_ub)
    return q, scale


def _static(x: Tensor, scale: Tensor, granularity: str, group_size: int, dtype: torch.dtype, pad_to: int) -> Tensor:
    q = _empty_q(x, dtype, pad_to, granularity)
    _core.quantize_fp8(q, x, scale, granularity, group_size, True, False, 0.0, None)
    return q


@explanation_of(quantize_fp8)
def explain(call: Arguments) -> str:
    x, scale, scale_ub, out, dtype, pad_to = call.x, call.scale, call.scale_ub, call.out, call.dtype, call.pad_to
    granularity, group_size, ue8m0, layout = call.granularity, call.group_size, call.ue8m0, call.scale_layout
    _expect(granularity, group_size, scale, scale_ub, call.eps, ue8m0, layout, dtype, pad_to, out)
    expect_tensors("quantize_fp8", {"x": x}, {"scale": scale, "scale_ub": scale_ub}, writes=False)
    is_static = scale is not None
    if out is not None:
        q, scale = out
    else:
        q = _empty_q(x, dtype, pad_to, granularity)
        scale = empty_scale(x, x.shape[-1], granularity, group_size, layout) if scale is None else scale
    return _core.explain_quantize_fp8(q, x, scale, granularity, group_size, is_static, ue8m0, call.eps, scale_ub)


_MEASURE = "str granularity, int group_size, Tensor? scale_ub, float eps, bool ue8m0"
for _schema, _function, _shapes in (
    (
        f"dynamic(Tensor x, {_MEASURE}, str scale_layout, ScalarType dtype, int pad_to) -> (Tensor, Tensor)",
        _dynamic,
        _empty_dynamic,
    ),
    (
        "static(Tensor x, Tensor scale, str granularity, int group_size, ScalarType dtype, int pad_to) -> Tensor",
        _static,
        lambda x, scale, granularity, group_size, dtype, pad_to: _empty_q(x, dtype, pad_to, granularity),
    ),
    (f"out(Tensor x, Tensor(a!) q, Tensor(b!) scale, {_MEASURE}, bool is_static) -> ()", _run_into, fake_out),
):
    register("quantize_fp8", f"quantize_fp8_{_schema}", _function, _shapes)
