"""What an operation writes into counts as changed: autograd refuses a tensor that it saved before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import epiloq
from every_operation import OPERATIONS, Operation, named


class ThroughTheDispatcher(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


WAYS = {"directly": nullcontext, "through the dispatcher": ThroughTheDispatcher}
WRITING = [
    pytest.param(operation, id=name) for name, operation in zip(named(), OPERATIONS, strict=True) if operation.written
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", WRITING)
def test_versions_of_what_is_written(operation: Operation, way: str, device: str, seed: int) -> None:
    arguments = {
        name: value.to(device) if hasattr(value, "to") else value for name, value in operation.arguments().items()
    }
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    before = {name: value._version for name, value in tensors.items()}
    context: AbstractContextManager[Any] = WAYS[way]()
    with context:
        operation.call(**arguments)
    changed = {name for name, value in tensors.items() if value._version > before[name]}
    assert changed == set(operation.written)


@pytest.mark.parametrize("way", WAYS)
def test_backward_through_what_was_saved_raises(way: str, device: str, seed: int) -> None:
    a, b = (torch.randint(-9, 9, (4, 16), dtype=torch.int8, device=device) for _ in range(2))
    one = torch.ones(1, device=device)
    x = torch.ones(4, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    factor = torch.full((4, 4), 2.0, device=device, dtype=torch.bfloat16)
    y = (x * factor).sum()
    context: AbstractContextManager[Any] = WAYS[way]()
    with context:
        epiloq.scaled_mm(a, b.t(), one, one, out=factor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_out_of_inference_mode(seed: int) -> None:
    """Which has no version to count."""
    a = torch.randint(-9, 9, (4, 16), dtype=torch.int8)
    with torch.inference_mode():
        out = torch.zeros(4, 4, dtype=torch.bfloat16)
        assert epiloq.scaled_mm(a, a.t(), torch.ones(1), torch.ones(1), out=out) is out
