"""Layers that a module also references outside its children, so that replacing the child would have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_DEPTH = 3
"""Maximum nesting of lists that are searched."""


def held_elsewhere(model: nn.Module) -> dict[int, str]:
    """Ids of modules that an attribute other than a child references, directly or in lists, and the class of its owner.

    For example, a class may keep its layers in a Python list and also register each one for the state dict.
    """
    found: dict[int, str] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found |= dict.fromkeys(map(id, _modules_in(value, _DEPTH)), type(module).__name__)
    return found


def _modules_in(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif type(value) in (list, tuple, dict) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(each, depth - 1)
