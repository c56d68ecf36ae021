"""The gated activation of a SwiGLU layer, in one kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.calls import direct, expect_tensors, mark_written, refuse_backward
from epiloq._torch.checks import Arguments, expect_flags, explanation_of
from epiloq._torch.library import register_product
from epiloq.ops.quantizers.gate import GATE, for_operator, gate_numbers

_NAME = "silu_and_mul"


def silu_and_mul(
    x: Tensor,
    *,
    alpha: float = 1.0,
    limit: float = math.inf,
    offset: float = 0.0,
    interleaved: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``silu(x[…, :K]) * x[…, K:]``, where ``silu(g) = g / (1 + exp(-g))``, in fp32 and rounded once.

    With options ``g * sigmoid(alpha * g) * (u + offset)``, where ``g = min(x[…, :K], limit)`` and ``u = clamp(x[…, K:],
    -limit, limit)``: the gate of GPT-OSS with ``alpha=1.702, limit=7, offset=1, interleaved=True``. NaN stays NaN.

    `silu_and_mul_quant` does the same and quantises the result. Exponentials differ in their last bits between CPU and
    GPU: the result is within half a unit in the last place of float64's, plus 2^-19 of it; an ``alpha`` that is no
    power of two adds ``2^-24 |alpha g|`` of it. Two kinds of gates lose more: one with ``alpha g`` below -88 gives 0
    for what is at most ``2^-121 / alpha`` of the other factor, ``u + offset``, and one whose own ``silu`` is
    subnormal (float32; if ``alpha`` is 1, one below 2^-125 in magnitude) may lose 2^-150 of it. Each device is
    deterministic.

    Args:
        x: ``[…, 2 K]`` float32, float16 or bfloat16, contiguous rows: the output of a fused gate and up projection.
        alpha: a factor of gates in their sigmoid, positive.
        limit: the largest gate, and the largest magnitude of the other factor, positive.
        offset: added to the other factor after its limit. These three are rounded to float32.
        interleaved: whether gates are ``x[…, ::2]`` and factors ``x[…, 1::2]``, instead of halves.
        out: ``[…, K]`` of that dtype, to write into and return.

    Returns:
        ``[…, K]`` of ``x``'s dtype.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass; the operation has no derivative.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    if interleaved is not False:
        expect_flags(_NAME, interleaved=interleaved)
    options = (*gate_numbers(_NAME, alpha, limit, offset), interleaved)
    if out is None:
        if direct((x,)):
            return _core.new_silu_and_mul(x, *options)
        expect_tensors(_NAME, {"x": x}, {}, writes=False)
        return refuse_backward(_NAME, torch.ops.epiloq.silu_and_mul(x, *for_operator(*options)))
    if direct((x, out)):
        return run(x, *options, out=out)
    expect_tensors(_NAME, {"x": x, "out": out}, {}, writes=True)
    torch.ops.epiloq.silu_and_mul_out(x, *for_operator(*options), out=out)
    return out


def run(
    x: Tensor,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    interleaved: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`silu_and_mul` for plain tensors; no limit is None, too."""
    limit = math.inf if limit is None else limit
    if out is None:
        return _core.new_silu_and_mul(x, alpha, limit, offset, interleaved)
    _core.silu_and_mul(out, x, alpha, limit, offset, interleaved)
    mark_written(out)
    return out


@explanation_of(silu_and_mul)
def explain(call: Arguments) -> str:
    expect_flags(_NAME, interleaved=call.interleaved)
    options = (*gate_numbers(_NAME, call.alpha, call.limit, call.offset), call.interleaved)
    expect_tensors(_NAME, {"x": call.x}, {}, writes=False)
    return _core.explain_silu_and_mul(_fake(call.x) if call.out is None else call.out, call.x, *options)


def _fake(x: Tensor, *_: Any) -> Tensor:
    if x.ndim == 0:
        raise ValueError(f"epiloq.{_NAME}: x: expected at least one dimension, got a scalar")
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


register_product(_NAME, f"Tensor x, {GATE}, bool interleaved=False", run, _fake, depth=None)
