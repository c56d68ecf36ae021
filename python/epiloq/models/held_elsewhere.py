"""Layers that a module holds beside its children, where putting another one in a child's place changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_DEPTH = 3
"""Lists in lists that are looked into."""


def held_elsewhere(model: nn.Module) -> dict[int, str]:
    """Modules by id that an attribute other than a child's holds, directly or in lists, and the class that has it.

    A class may keep its layers in a list of Python and register each under a name, for its state dict, as well.
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
