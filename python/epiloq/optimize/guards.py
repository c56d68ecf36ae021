"""Whether a fused ``forward`` may pass over the modules that it joins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def untouched(module: nn.Module, *ours: Callable[..., Any]) -> bool:
    """Whether nothing but the class of `module` says what it computes, or a ``forward`` made of one of `ours`.

    Forward hooks, and a ``forward`` that somebody else put on the instance (as accelerate does), are to be called.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    forward = vars(module).get("forward")
    return forward is None or (isinstance(forward, partial) and forward.func in ours)


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether autograd follows one of these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
