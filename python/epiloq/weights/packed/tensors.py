"""PackedTensors: base class of packed weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

_Weight = TypeVar("_Weight", bound="PackedTensors")


class PackedTensors:
    """A weight that consists of tensors in the kernels' order, and of numbers. Subclasses are frozen dataclasses."""

    TENSORS: ClassVar[tuple[str, ...]]
    """Names of the tensors; all but the first two may be None."""
    q: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, including padding."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that are present, by name, without copies."""
        tensors = {name: getattr(self, name) for name in self.TENSORS}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def map(self: _Weight, change: Callable[[Tensor], Tensor]) -> _Weight:
        """The same weight with ``change`` applied to every tensor."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.state_dict().items()}
        return replace(self, **changed)  # type: ignore[type-var]

    def to(self: _Weight, device: torch.device | str) -> _Weight:
        """The same weight on another device. (The types of its tensors do not change.)"""
        where = torch.device(device)
        return self.map(lambda tensor: tensor.to(where))
