"""Vectors have the shapes that are documented: those that only have the right number of elements are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq
from every_operation import OPERATIONS, Operation, named

CASES = [
    pytest.param(operation, argument, id=f"{name}-{argument}")
    for name, operation in zip(named(), OPERATIONS, strict=True)
    for argument in operation.vectors
]


def to(device: str, value: Any) -> Any:
    return value.to(device) if hasattr(value, "to") else value


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


def shapes_of(count: int) -> list[tuple[int, ...]]:
    """Every way to lay `count` elements out in one to three dimensions, a few of one more or less, and fewer rows."""
    splits = [(d, count // d) for d in range(1, count + 1) if count % d == 0]
    threes = [(a, b // c, c) for a, b in splits for c in (1, 2, b) if b % c == 0]
    return [(count,), *splits, *threes, (1, 1, 1, count), (count, 1, 1, 1), (count + 1,), (count + 1, 1)]


def test_every_operation_has_a_row() -> None:
    assert {operation.name for operation in OPERATIONS} == set(epiloq.ops.__all__)


@pytest.mark.parametrize(("operation", "argument"), CASES)
def test_documented_shapes_are_accepted(operation: Operation, argument: str, device: str, seed: int) -> None:
    """And mean the same."""
    arguments = {name: to(device, value) for name, value in operation.arguments().items()}
    value, results = arguments[argument], []
    for shape in {tuple(value.shape), *operation.vectors[argument]}:
        given = value if value.shape == shape else None if value.numel() != torch.Size(shape).numel() else value
        if given is None:
            continue
        result = operation.call(**{**arguments, argument: given.reshape(shape).contiguous()})
        results.append(arguments[operation.written[0]].clone() if operation.written else result)
    first = results[0]
    if isinstance(first, Tensor):
        assert all(torch.equal(bits(first), bits(result)) for result in results)


@pytest.mark.parametrize(("operation", "argument"), CASES)
def test_other_shapes_are_refused_by_name(operation: Operation, argument: str, device: str, seed: int) -> None:
    valid = operation.arguments()
    allowed = {tuple(valid[argument].shape), *operation.vectors[argument]}
    for shape in sorted({*shapes_of(valid[argument].numel())} - allowed):
        if torch.Size(shape).numel() == 1:
            continue
        arguments = {name: to(device, value) for name, value in operation.arguments().items()}
        count, flat = torch.Size(shape).numel(), arguments[argument].flatten()
        arguments[argument] = flat.repeat(2)[:count].reshape(shape).contiguous()
        written = {name: bits(arguments[name]) for name in operation.written}
        name = {"total": "sum"}.get(argument, argument)
        with pytest.raises(ValueError, match=rf"epiloq\.{operation.name}: (weight\.)?{name}: expected") as error:
            operation.call(**arguments)
        assert "got" in str(error.value)
        for name, before in written.items():
            assert torch.equal(before, bits(arguments[name])), (name, shape)
