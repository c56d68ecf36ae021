"""A router's logits for a few tokens, in one kernel that uses many SMs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from epiloq import _core
from epiloq._torch.library import direct, register

_NAME = "expert_logits"
MOST_TOKENS = 16
"""Of the kernel."""
_HALVES = (torch.float16, torch.bfloat16)


def expert_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``x @ weight.t() + bias``, summed in float32 and rounded once.

    Args:
        x: ``[T, K]`` float16 or bfloat16, contiguous rows, of at most `MOST_TOKENS` tokens.
        weight: ``[E, K]`` of that dtype, contiguous rows.
        bias: ``[E]`` of that dtype.
        dtype: of the logits, that of `x` (default) or float32.

    Returns:
        ``[T, E]``.

    For inference only: there is no derivative.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    dtype = dtype or x.dtype
    if direct((x, weight), (bias,)):
        return run(x, weight, bias, dtype)
    logits: Tensor = torch.ops.epiloq.expert_logits(x, weight, bias, dtype)
    return logits


def run(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`expert_logits` for plain tensors."""
    logits = _empty(x, weight, bias, dtype)
    if not x.is_cuda:
        _core.check_expert_logits(logits, x, weight, bias)
    elif _core.expert_logits(logits, x, weight, bias):
        return logits
    return logits.copy_(functional.linear(x.float(), weight.float(), None if bias is None else bias.float()))


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports these sizes and dtypes."""
    return x.dtype in _HALVES and weight.dtype == x.dtype and x.shape[0] <= MOST_TOKENS


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


register(_NAME, f"{_NAME}(Tensor x, Tensor weight, Tensor? bias, ScalarType dtype) -> Tensor", run, _empty)
