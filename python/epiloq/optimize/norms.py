"""RMS norms in one kernel: Llama's, GPT-OSS's, which multiplies in float32, and Gemma's, which multiplies by one more
than its weight.

In eager mode and in CUDA graphs of it `epiloq.rms_norm` computes them, if there is a residual with its addition; in a
graph that `torch.compile` makes of a decode step it computes Llama's and GPT-OSS's. In other graphs torch's norm does,
which inductor fuses with what surrounds it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from epiloq._torch.calls import PLAIN, direct
from epiloq.ops.quantizers.rms_norm import rms_norm as rms_norm_kernel
from epiloq.ops.quantizers.rms_norm import run as run_rms_norm
from epiloq.optimize import forms, structure
from epiloq.optimize.guards import decodes_in_graph, in_rows, wants_gradient


def rms_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """``forward`` of a norm in Llama's form."""
    weight = norm.weight
    if weight.dtype != hidden_states.dtype:
        return type(norm).forward(norm, hidden_states)  # type: ignore[no-any-return]
    if not is_compiling() and direct((hidden_states, weight)):
        return _norm(hidden_states, weight, norm.variance_epsilon)
    if decodes_in_graph(hidden_states) and not wants_gradient(hidden_states, weight):
        return rms_norm_kernel(hidden_states.contiguous(), weight, norm.variance_epsilon)
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, norm.variance_epsilon)


def float_rms_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """``forward`` of a norm in GPT-OSS's form, whose weight may stay in float32."""
    weight = norm.weight
    if not _multiplies(weight, hidden_states) or wants_gradient(hidden_states, weight):
        return type(norm).forward(norm, hidden_states)  # type: ignore[no-any-return]
    if not is_compiling() and direct((hidden_states, weight)):
        return _norm(hidden_states, weight, norm.variance_epsilon)
    if decodes_in_graph(hidden_states):
        return rms_norm_kernel(hidden_states.contiguous(), weight, norm.variance_epsilon)
    return type(norm).forward(norm, hidden_states)  # type: ignore[no-any-return]


def _multiplies(weight: Tensor, x: Tensor) -> bool:
    """Whether the kernel multiplies a norm of `x` by a weight of this dtype."""
    return weight.dtype in (x.dtype, torch.float32)


class _Held(NamedTuple):
    """What a norm multiplies by, and the weight that it was computed from."""

    factor: Tensor
    memory: Tensor
    """Of the weight, which is kept so that no other tensor can have its address."""
    version: int


class Offset:
    """What a norm in Gemma's form multiplies by: ``1 + weight`` in float32, computed when the weight has changed, in
    the same memory if it fits, because captured CUDA graphs keep its address."""

    def __init__(self) -> None:
        self._held: _Held | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": None}

    def of(self, weight: Tensor) -> Tensor:
        held = self._held
        if held is not None and held.version == weight._version and held.memory.data_ptr() == weight.data_ptr():
            return held.factor
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return 1 + weight.float()  # in the graph's memory
        with torch.inference_mode(False), torch.no_grad():
            kept = held is not None and (held.factor.shape, held.factor.device) == (weight.shape, weight.device)
            factor = held.factor.copy_(weight).add_(1) if held is not None and kept else 1 + weight.float()
            self._held = _Held(factor, weight.detach(), weight._version)
        return factor


def offset_rms_norm(norm: Any, offset: Offset, x: Tensor) -> Tensor:
    """``forward`` of a norm in Gemma's form, which computes in float32."""
    weight = norm.weight
    if wants_gradient(x, weight):
        return type(norm).forward(norm, x)  # type: ignore[no-any-return]
    if is_compiling() or weight.is_inference() or not direct((x, weight)):
        factor = 1 + weight.float()
        return torch.rms_norm(x.float(), factor.shape, factor, norm.eps).type_as(x)
    return _norm(x, offset.of(weight), norm.eps)


NORMS = (rms_norm, float_rms_norm, offset_rms_norm)


def fused_norm(norm: nn.Module) -> partial[Tensor] | None:
    """The ``forward`` of a recognised norm, one of `NORMS`; None for another."""
    if structure.has_form(norm, forms.RMS_NORM):
        return partial(rms_norm, norm)
    if structure.has_form(norm, forms.FLOAT_RMS_NORM):
        return partial(float_rms_norm, norm)
    if structure.has_form(norm, forms.OFFSET_RMS_NORM) and structure.norms_in_float32(type(norm)):
        return partial(offset_rms_norm, norm, Offset())
    return None


def factor_of(forward: partial[Tensor], x: Tensor) -> Tensor | None:
    """What a norm with this result of `fused_norm` multiplies a plain `x` by; None if it must be called."""
    weight = vars(forward.args[0])["_parameters"].get("weight")
    if type(weight) not in PLAIN or weight.device != x.device:
        return None
    if forward.func is rms_norm:
        return weight if weight.dtype == x.dtype else None
    if forward.func is float_rms_norm:
        return weight if _multiplies(weight, x) else None
    return None if weight.is_inference() else forward.args[1].of(weight)


def factor_of_graph(forward: partial[Tensor], x: Tensor) -> Tensor | None:
    """`factor_of` in a graph, where Gemma's norms are called."""
    weight: Tensor = forward.args[0].weight
    if forward.func is float_rms_norm:
        return weight if _multiplies(weight, x) else None
    return weight if forward.func is rms_norm and weight.dtype == x.dtype else None


def normed_by(forward: partial[Tensor], factor: Tensor, x: Tensor) -> Tensor:
    """The norm of a plain `x`, without a gradient, by the result of `factor_of`."""
    return _norm(x, factor, eps_of(forward))


def sum_normed_by(
    forward: partial[Tensor], factor: Tensor, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)``, as `normed_by`."""
    if residual is None:
        return normed_by(forward, factor, x), x
    if in_rows(x, residual, factor) and x.shape == residual.shape and x.dtype == residual.dtype:
        both: tuple[Tensor, Tensor] = run_rms_norm(x, factor, eps_of(forward), residual)
        return both
    total = residual + x
    return normed_by(forward, factor, total), total


def sum_normed(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same of a module whose ``forward`` is from `fused_norm`; None if it must be called, or in a graph other than
    of a decode step."""
    forward = vars(norm).get("forward")
    if decodes_in_graph(x):
        return _sum_normed_in_graph(norm, forward, x, residual)
    if is_compiling() or not isinstance(forward, partial) or not direct((x, residual)):
        return None
    factor = factor_of(forward, x)
    if factor is None or wants_gradient(forward.args[0].weight):
        return None
    return sum_normed_by(forward, factor, x, residual)


def _sum_normed_in_graph(norm: Any, forward: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
    weight = factor_of_graph(forward, x) if isinstance(forward, partial) and forward.func in NORMS else None
    if weight is None or x.shape != residual.shape or x.dtype != residual.dtype or wants_gradient(x, residual, weight):
        return None
    return rms_norm_kernel(x.contiguous(), weight, norm.variance_epsilon, residual=residual.contiguous())


def eps_of(forward: partial[Tensor]) -> float:
    """What a norm with this result of `fused_norm` adds to the mean of squares."""
    norm = forward.args[0]
    return norm.eps if forward.func is offset_rms_norm else norm.variance_epsilon  # type: ignore[no-any-return]


def _norm(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    """The norm of a plain `x`, without a gradient, multiplied by a factor of its dtype or float32."""
    if in_rows(x, factor):
        y: Tensor = run_rms_norm(x, factor, eps, None)
        return y
    if factor.dtype == x.dtype:
        return torch.rms_norm(x, factor.shape, factor, eps)
    return torch.rms_norm(x.float(), factor.shape, factor, eps).type_as(x)
