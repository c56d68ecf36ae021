"""int8 quantisation of activations: static or dynamic, per tensor or per token, symmetric or with a zero point."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, mark_written, refuse_backward
from epiloq._torch.checks import Arguments, expect_flags, expect_positive, explanation_of
from epiloq._torch.library import fake_out, register
from epiloq.ops.quantizers.outputs import empty_q
from epiloq.weights.tensor_checks import refuse

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def quantize_int8(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    symmetric: bool = True,
    granularity: str = "token",
    pad_to: int = 1,
    range_includes_zero: bool = True,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``q = clamp(round(x / scale) + azp, -128, 127)``, a true division, ties to even; the same bits on CPU and GPU.

    Without ``scale`` the parameters are measured, per token (row of ``x``) or per tensor:

    - symmetric: ``scale = amax / 127``, no zero point;
    - asymmetric: ``scale = (hi - lo) / 255``, ``azp = round(-128 - lo / scale)``, where [lo, hi] is the range of the
      values widened to contain 0, so that ``azp`` is in [-128, 127] and 0 is represented exactly.

    ``scale`` is at least 2^-126, so that zeros give zeros. A row with NaN or an infinity, or (asymmetric) with a range
    beyond float32, gets a scale that is not finite and q = azp throughout, so that everything computed from it is NaN,
    as in floating point. With a static scale NaN counts as 0 and infinities saturate.

    Args:
        x: ``[…, K]`` float32, float16 or bfloat16, contiguous rows.
        scale: static scale, float32, one element or one per row: ``[M]``, ``[M, 1]`` or ``[…, 1]``. Returned unchanged.
        azp: static and asymmetric: int32, with the elements and shapes of ``scale``.
        symmetric: False gives zero points; inferred from ``azp`` if ``scale`` is given.
        granularity: "token" or "tensor", for measured scales. (`quantize_fp8`'s default is "tensor".)
        pad_to: pads q's columns with zeros to a multiple of this (16 for `scaled_mm`).
        range_includes_zero: False does not widen [lo, hi] (unless lo == hi), like vLLM.
        out: ``(q, scale, azp)`` to write into and return, azp None if symmetric; dynamic per token, or static with the
            given ``scale`` and ``azp`` themselves. Columns of q beyond K are set to 0, with or without ``pad_to``.

    Returns:
        ``q`` int8 ``[…, K']``, ``scale`` float32 and ``azp`` int32 or None: ``[…, 1]`` per token, ``[1]`` per tensor.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass through a measured scale, which has no derivative.
    """
    _expect(x, scale, azp, symmetric, granularity, pad_to, out)
    expect_flags("quantize_int8", range_includes_zero=range_includes_zero)
    if out is not None:
        q, out_scale, out_azp = out
        if direct((x, q, out_scale), (out_azp,)):
            _run_into(x, q, out_scale, out_azp, scale is not None, range_includes_zero)
        else:
            expect_tensors("quantize_int8", {"x": x, "out": q, "scale": out_scale}, {"azp": out_azp}, writes=True)
            torch.ops.epiloq.quantize_int8_out(x, q, out_scale, out_azp, scale is not None, range_includes_zero)
        return out
    if scale is None and granularity == "tensor":
        scale, azp = _measure_tensor(x, symmetric, range_includes_zero)
        refuse_backward("quantize_int8", scale)
    if scale is not None:
        if direct((x, scale), (azp,)):
            return _static(x, scale, azp, pad_to), scale, azp
        expect_tensors("quantize_int8", {"x": x, "scale": scale}, {"azp": azp}, writes=False)
        return torch.ops.epiloq.quantize_int8_static(x, scale, azp, pad_to), scale, azp
    if direct((x,)):
        return (*_symmetric(x, pad_to), None) if symmetric else _asymmetric(x, pad_to, range_includes_zero)
    expect_tensors("quantize_int8", {"x": x}, {}, writes=False)
    if symmetric:
        q, scale = torch.ops.epiloq.quantize_int8_symmetric(x, pad_to)
    else:
        q, scale, azp = torch.ops.epiloq.quantize_int8_asymmetric(x, pad_to, range_includes_zero)
    return q, refuse_backward("quantize_int8", scale), azp


def _expect(
    x: Tensor,
    scale: Tensor | None,
    azp: Tensor | None,
    symmetric: bool,
    granularity: str,
    pad_to: int,
    out: tuple[Tensor, Tensor, Tensor | None] | None,
) -> None:
    """Check arguments against each other; C++ checks the tensors."""
    if granularity not in ("token", "tensor"):
        refuse("quantize_int8", "granularity", '"token" or "tensor"', repr(granularity))
    expect_positive("quantize_int8", pad_to=pad_to)
    expect_flags("quantize_int8", symmetric=symmetric)
    if scale is None and azp is not None:
        refuse("quantize_int8", "azp", "None where scale is None (both are measured)", "a zero point")
    if scale is not None and azp is None and not symmetric:
        refuse("quantize_int8", "azp", "a zero point with scale and symmetric=False", None)
    if out is not None:
        _expect_out(out, scale, azp, symmetric, granularity)
    elif scale is None and granularity == "tensor":
        expect_tensors("quantize_int8", {"x": x}, {}, writes=False)
        if x.dtype not in _FLOATS:
            refuse("quantize_int8", "x", "float32 or float16 or bfloat16", x.dtype)


def _expect_out(
    out: tuple[Tensor, Tensor, Tensor | None],
    scale: Tensor | None,
    azp: Tensor | None,
    symmetric: bool,
    granularity: str,
) -> None:
    if not isinstance(out, (tuple, list)) or len(out) != 3:
        got = f"{len(out)} elements" if isinstance(out, (tuple, list)) else type(out).__name__
        refuse("quantize_int8", "out", "(q, scale, azp)", got)
    if scale is not None and (out[1] is not scale or out[2] is not azp):
        refuse("quantize_int8", "out", "the given scale and azp as its last two", "others")
    if scale is None and granularity == "tensor":
        refuse("quantize_int8", "granularity", '"token" with out', '"tensor"')
    if scale is None and (out[2] is None) != symmetric:
        wanted, got = ("None", "a tensor") if symmetric else ("a tensor", "None")
        refuse("quantize_int8", "out", f"{wanted} for azp with symmetric={symmetric}", got)


def _measure_tensor(x: Tensor, symmetric: bool, range_includes_zero: bool) -> tuple[Tensor, Tensor | None]:
    # The minimum and maximum, quantised as one token, have the tensor's parameters. An empty tensor has those of
    # zeros, as in quantize_fp8.
    ends = torch.stack(torch.aminmax(x)) if x.numel() else x.new_zeros(2)
    ends = ends.to(torch.float32).view(1, 2)
    _, scale, azp = quantize_int8(ends, symmetric=symmetric, range_includes_zero=range_includes_zero)
    return scale.view(1), None if azp is None else azp.view(1)


def _run_into(x: Tensor, q: Tensor, scale: Tensor, azp: Tensor | None, is_static: bool, *rest: bool) -> None:
    _core.quantize_int8(q, x, scale, azp, is_static, *rest)
    mark_written(q, *(() if is_static else (scale, azp)))


def _empty_q(x: Tensor, pad_to: int) -> Tensor:
    return empty_q("quantize_int8", x, torch.int8, x.shape[-1] if x.ndim else 0, pad_to)


def _empty_parameter(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(*x.shape[:-1], 1, dtype=dtype)


def _empty_symmetric(x: Tensor, pad_to: int) -> tuple[Tensor, Tensor]:
    return _empty_q(x, pad_to), _empty_parameter(x, torch.float32)


def _symmetric(x: Tensor, pad_to: int) -> tuple[Tensor, Tensor]:
    q, scale = _empty_symmetric(x, pad_to)
    _core.quantize_int8(q, x, scale, None, False, True)
    return q, scale


def _empty_asymmetric(x: Tensor, pad_to: int, range_includes_zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    return *_empty_symmetric(x, pad_to), _empty_parameter(x, torch.int32)


def _asymmetric(x: Tensor, pad_to: int, range_includes_zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, scale, azp = _empty_asymmetric(x, pad_to, range_includes_zero)
    _core.quantize_int8(q, x, scale, azp, False, range_includes_zero)
    return q, scale, azp


def _static(x: Tensor, scale: Tensor, azp: Tensor | None, pad_to: int) -> Tensor:
    q = _empty_q(x, pad_to)
    _core.quantize_int8(q, x, scale, azp, True, True)
    return q


@explanation_of(quantize_int8)
def explain(call: Arguments) -> str:
    x, scale, azp = call.x, call.scale, call.azp
    _expect(x, scale, azp, call.symmetric, call.granularity, call.pad_to, call.out)
    expect_tensors("quantize_int8", {"x": x}, {"scale": scale, "azp": azp}, writes=False)
    is_static = scale is not None
    if call.out is not None:
        q, scale, azp = call.out
    else:
        q = _empty_q(x, call.pad_to)
        if scale is None:
            scale = _empty_parameter(x, torch.float32)
            azp = None if call.symmetric else _empty_parameter(x, torch.int32)
    _core.check_quantize_int8(q, x, scale, azp, is_static, call.range_includes_zero)
    if not x.is_cuda:
        return "cpu, vectorised rows"
    whole = x.shape[-1] % 8 == 0 and x.shape[-1] <= 32768
    return "cuda, the row in registers, one pass" if whole else "cuda, element by element, two passes"


for _schema, _function, _shapes in (
    ("symmetric(Tensor x, int pad_to) -> (Tensor, Tensor)", _symmetric, _empty_symmetric),
    (
        "asymmetric(Tensor x, int pad_to, bool range_includes_zero) -> (Tensor, Tensor, Tensor)",
        _asymmetric,
        _empty_asymmetric,
    ),
    (
        "static(Tensor x, Tensor scale, Tensor? azp, int pad_to) -> Tensor",
        _static,
        lambda x, scale, azp, pad_to: _empty_q(x, pad_to),
    ),
    (
        "out(Tensor x, Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? azp, bool is_static, bool range_includes_zero)"
        " -> ()",
        _run_into,
        fake_out,
    ),
):
    register("quantize_int8", f"quantize_int8_{_schema}", _function, _shapes)
