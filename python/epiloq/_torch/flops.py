"""Formulas of products for ``torch.utils.flop_counter.FlopCounterMode``.

They are registered when its module is imported, which may be later: importing it with epiloq would import Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"
_depths: dict[str, Callable[..., int]] = {}


def columns(x: Any, *_: Any) -> int:
    """The number of products that add up to an element of a matrix product with `x` ``[…, K]``."""
    return int(x.shape[-1])


def count(name: str, depth: Callable[..., int]) -> None:
    """Count two operations per element of ``depth(*arguments)`` products that ``name`` or ``name_out`` computes."""
    _depths[name] = depth
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER], name)


def _register(counter: ModuleType, name: str) -> None:
    depth = _depths[name]

    def flops(*arguments: Any, out_val: Any = None, out: Any = None, **_: Any) -> int:
        return 2 * int((out_val if out is None else out).numel()) * depth(*arguments)

    operators = [getattr(torch.ops.epiloq, of) for of in (name, f"{name}_out")]
    counter.register_flop_formula(operators, get_raw=True)(flops)


class _WhenExecuted(MetaPathFinder):
    """Finds the counter's module as Python does, with a loader that registers the formulas after executing it.

    It stays until then, since others may ask for the module without importing it.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _COUNTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            for name in _depths:
                _register(module, name)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _WhenExecuted())
