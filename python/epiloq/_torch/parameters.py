"""FrozenParameter: a parameter without gradient, for the tensors of quantised layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor


class FrozenParameter(nn.Parameter):
    """A parameter that no optimiser changes: it has no gradient, and ``requires_grad_(True)`` leaves it without one.

    Fine-tuning can so call it on a whole model, although torch has no gradients of integers.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> FrozenParameter:
        return super().__new__(cls, data, False)

    def requires_grad_(self, requires_grad: bool = True) -> FrozenParameter:
        """Return the parameter unchanged: it never has a gradient."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FrozenParameter, (self.detach(),)


def _accept_in_fake_mode() -> None:
    """Make torch's fake mode, and so AOTInductor, accept `FrozenParameter` wherever it accepts `Parameter`.

    Before torch 2.13 it assumes that any other class overrides operations, and refuses it ("Multiple dispatch failed").
    """
    overrides_operations = getattr(fake_tensor, "_check_for_subclass_arg", None)
    if overrides_operations is not None and overrides_operations(FrozenParameter(torch.empty(0))):
        fake_tensor._check_for_subclass_arg = lambda x: type(x) is not FrozenParameter and overrides_operations(x)


_accept_in_fake_mode()
