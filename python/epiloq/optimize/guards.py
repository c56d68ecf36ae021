"""Checks whether a fused ``forward`` may bypass the modules that it combines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from epiloq._torch.calls import PLAIN
from epiloq._torch.tracing import is_exporting


def untouched(module: nn.Module, *ours: Callable[..., Any]) -> bool:
    """Whether `module` computes what its class defines, or has a ``forward`` from `ours`.

    Forward hooks, and a ``forward`` installed on the instance by others (such as accelerate), must be called.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    forward = vars(module).get("forward")
    return forward is None or (isinstance(forward, partial) and forward.func in ours)


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether each tensor (or None) is plain, so that its values are those of its memory. `direct` checks more."""
    return all(t is None or (type(t) in PLAIN and t.layout is torch.strided and not t.is_neg()) for t in tensors)


def decodes_in_graph(x: Tensor) -> bool:
    """Whether `torch.compile` makes a graph of a decode step, of ``[B, 1, K]``.

    There each kernel takes a few microseconds, and epiloq's, unlike inductor's, start before their predecessor has
    ended. A prompt's take longer, and inductor fuses more of them.
    """
    return is_compiling() and type(x) is Tensor and x.dim() == 3 and x.shape[1] == 1 and not is_exporting()


_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


def in_rows(*tensors: Tensor) -> bool:
    """Whether epiloq's kernels can read plain tensors as they are: floating-point ones, dense in memory."""
    return all(tensor.dtype in _FLOATS and tensor.is_contiguous() for tensor in tensors)


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether autograd tracks any of these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
