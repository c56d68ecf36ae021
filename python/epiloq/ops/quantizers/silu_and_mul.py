"""The gated activation of a SwiGLU layer, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from epiloq import _core
from epiloq._torch.checks import Arguments, explanation_of
from epiloq._torch.library import direct, expect_tensors, mark_written, refuse_backward, register_product

_NAME = "silu_and_mul"


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``silu(x[…, :K]) * x[…, K:]``, where ``silu(g) = g / (1 + exp(-g))``, in fp32 and rounded once.

    `silu_and_mul_quant` does the same and quantises the result. Exponentials differ in their last bits between CPU and
    GPU: the result is within half a unit in the last place of float64's, plus 2^-19 of it. Two kinds of gates lose
    more: one below -88 gives 0 for what is at most 2^-121 of the other factor, and one below 2^-125 in magnitude
    (float32) may lose 2^-150 of it, because its own ``silu`` is subnormal. Each device is deterministic.

    Args:
        x: ``[…, 2 K]`` float32, float16 or bfloat16, contiguous rows: the output of a fused gate and up projection.
        out: ``[…, K]`` of that dtype, to write into and return.

    Returns:
        ``[…, K]`` of ``x``'s dtype.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
        NotImplementedError: in a backward pass; the operation has no derivative.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    if out is None:
        if direct((x,)):
            return run(x)
        expect_tensors(_NAME, {"x": x}, {}, writes=False)
        return refuse_backward(_NAME, torch.ops.epiloq.silu_and_mul(x))
    if direct((x, out)):
        return run(x, out=out)
    expect_tensors(_NAME, {"x": x, "out": out}, {}, writes=True)
    torch.ops.epiloq.silu_and_mul_out(x, out=out)
    return out


def run(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu_and_mul` for plain tensors."""
    if out is None:
        return _core.new_silu_and_mul(x)
    _core.silu_and_mul(out, x)
    mark_written(out)
    return out


@explanation_of(silu_and_mul)
def explain(call: Arguments) -> str:
    expect_tensors(_NAME, {"x": call.x}, {}, writes=False)
    return _core.explain_silu_and_mul(_fake(call.x) if call.out is None else call.out, call.x)


def _fake(x: Tensor) -> Tensor:
    if x.ndim == 0:
        raise ValueError(f"epiloq.{_NAME}: x: expected at least one dimension, got a scalar")
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


register_product(_NAME, "Tensor x", run, _fake, depth=None)
