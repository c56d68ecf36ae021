"""What all quantised layers do when they are cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

_Layer = TypeVar("_Layer", bound="KeptDtypes")


class KeptDtypes(nn.Module):
    """A module whose buffers keep their dtypes, all but "bias": ``.to(dtype)`` would round scales or widen integers."""

    def _apply(self: _Layer, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Layer:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and name != "bias" and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self
