"""RMS normalisation, optionally of a sum with a residual, in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, mark_written, refuse_backward
from epiloq._torch.checks import Arguments, as_number, explanation_of
from epiloq._torch.library import fake_out, register

_NAME = "rms_norm"


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = ..., *, residual: None = ..., out: Tensor | None = ...
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = ..., *, residual: Tensor, out: tuple[Tensor, Tensor] | None = ...
) -> tuple[Tensor, Tensor]: ...
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor | None = None, out: Any = None) -> Any:
    """``y = r / sqrt(mean(r^2) + eps) * weight``, the mean over K; r is ``x``, or ``x + residual``.

    The sum is rounded to the dtype of ``x``, because it is returned as the next residual; everything from r to y is
    fp32, rounded once, in one pass over memory. `rms_norm_quant` does the same and quantises y.

    y is within half a unit in the last place of float64's, plus 2^-19 of it, for rows of up to 40960 columns whose sum
    of squares float32 represents (for values from 1e19 on the norm is 0, as torch's). Where the element is subnormal
    before it is multiplied by the weight (float32), 2^-150 of the weight are added. CPU and GPU add squares in a
    different order, so that their last bits may differ. The returned sum has the same bits. Each device is
    deterministic.

    Args:
        x: ``[…, K]`` float32, float16 or bfloat16, contiguous rows.
        weight: ``[K]`` of that dtype or float32.
        eps: added to the mean of the squares.
        residual: of ``x``'s shape and dtype.
        out: y, or with a residual ``(y, residual_out)``, to write into and return; ``residual_out`` may be
            ``residual`` itself, which is then updated in place.

    Returns:
        y of ``x``'s shape and dtype; with a residual ``(y, x + residual)``.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass; the operation has no derivative.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    eps = as_number(_NAME, "eps", eps)
    if out is not None:
        _write_into(x, weight, eps, residual, out)
        return out
    if direct((x, weight), (residual,)):
        return run(x, weight, eps, residual)
    expect_tensors(_NAME, {"x": x, "weight": weight}, {"residual": residual}, writes=False)
    if residual is None:
        return refuse_backward(_NAME, torch.ops.epiloq.rms_norm(x, weight, eps))
    y, total = torch.ops.epiloq.rms_norm_add(x, weight, eps, residual)
    return refuse_backward(_NAME, y), refuse_backward(_NAME, total)


# `rms_norm` for plain tensors: arguments x, weight, eps and residual or None.
run: Callable[[Tensor, Tensor, float, Tensor | None], Any] = _core.new_rms_norm


def _write_into(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Any) -> None:
    if residual is None and isinstance(out, (tuple, list)):
        raise ValueError(f"epiloq.{_NAME}: out: expected one tensor, got {len(out)} elements; residual is None")
    if residual is not None and (not isinstance(out, (tuple, list)) or len(out) != 2):
        got = f"{len(out)} elements" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"epiloq.{_NAME}: out: expected (y, residual_out), got {got}")
    y, residual_out = (out, None) if residual is None else out
    arguments = (x, weight, eps, residual, y, residual_out)
    if direct((x, weight, y), (residual, residual_out)):
        return _run_into(*arguments)
    optional = {"residual": residual, "residual_out": residual_out}
    expect_tensors(_NAME, {"x": x, "weight": weight, "out": y}, optional, writes=True)
    torch.ops.epiloq.rms_norm_out(*arguments)


def _run_into(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor, residual_out: Tensor | None
) -> None:
    _core.rms_norm(out, x, weight, residual, residual_out, eps)
    mark_written(out, residual_out)


@explanation_of(rms_norm)
def explain(call: Arguments) -> str:
    x, weight, residual, out = call.x, call.weight, call.residual, call.out
    eps = as_number(_NAME, "eps", call.eps)
    expect_tensors(_NAME, {"x": x, "weight": weight}, {"residual": residual}, writes=False)
    if residual is None:
        return _core.explain_rms_norm(x.new_empty(x.shape) if out is None else out, x, weight, None, None, eps)
    y, residual_out = (x.new_empty(x.shape), x.new_empty(x.shape)) if out is None else out
    return _core.explain_rms_norm(y, x, weight, residual, residual_out, eps)


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


_INPUTS = "Tensor x, Tensor weight, float eps"
for _schema, _function, _shapes in (
    (f"({_INPUTS}) -> Tensor", lambda x, weight, eps: run(x, weight, eps, None), _fake),
    (
        f"_add({_INPUTS}, Tensor residual) -> (Tensor, Tensor)",
        run,
        lambda x, weight, eps, residual: (_fake(x, weight, eps), _fake(x, weight, eps)),
    ),
    (f"_out({_INPUTS}, Tensor? residual, Tensor(a!) out, Tensor(b!)? residual_out) -> ()", _run_into, fake_out),
):
    register(_NAME, f"{_NAME}{_schema}", _function, _shapes)
