"""FrozenParameter: a parameter without gradient, for the tensors of quantised layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


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
