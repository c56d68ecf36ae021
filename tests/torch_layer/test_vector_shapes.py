"""Vectors have the shapes that are documented: those that only have the right number of elements are refused. Every
operation refuses what it does not take by the names that its caller knows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import epiloq
from every_operation import OPERATIONS, Operation, named
from operation_arguments import SIZE, Arguments

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


# Whatever else is right, these are no tensors that any operation takes.
NO_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda _: None,
    "a list": Tensor.tolist,
    "an array": lambda t: np.zeros(t.shape, np.int8),
    "text": lambda _: "x",
    "complex64": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.to(torch.bool),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t]),
}
DTYPES = tuple(dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))
# These may be right, as for another tensor that would fit, or another argument may be the wrong one.
OTHER_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    **{str(dtype): partial(torch.Tensor.to, dtype=dtype) for dtype in DTYPES},
    "meta": lambda t: t.to("meta"),
    "another dimension": lambda t: t[None],
    "twice": lambda t: torch.stack((t, t)),
    "seven dimensions": lambda t: t.reshape((1,) * (7 - t.ndim) + t.shape),
    "a scalar": lambda t: t.flatten()[0],
    "one too many": lambda t: torch.cat([t, t[-1:]]),
    "one too few": lambda t: t[:-1],
    "a wide row": lambda t: torch.cat([t, t[..., -1:]], -1),
    "nothing": lambda t: t[:0],
    "spread": lambda t: torch.stack((t, t), -1)[..., 0],
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
}
WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "bool": (None, "no", 2, 0.5),
    "int": ("x", 2.5, [1], True, 2**40),
    "str": (None, 3, "x", ("token",)),
    "float": ("x", [1.0], 10**400),
    "torch.dtype": ("bfloat16", torch.float64, torch.complex64, 1),
    "tuple[float, float]": (3, (2.0, 1.0), ("a", "b"), (float("nan"), 1.0)),
}
# Made of outputs elsewhere in the table, or given by the operation itself.
ANOTHER_NAME = {"total": "sum", "q": "out", "parameters": "w_scale"}


def with_wrong_tensors(operation: Operation) -> Iterator[tuple[str, str, Any, Arguments]]:
    """Each tensor of a call, and of its packed weight, replaced by each of the above: the argument's name, what it is
    replaced by in words, the replacement, and the arguments of the call."""
    wrong = {**NO_TENSORS, **OTHER_TENSORS}
    for argument, value in operation.arguments().items():
        parts = {name: t for name, t in vars(value).items() if isinstance(t, Tensor)} if is_dataclass(value) else {}
        for part, tensor in {"": value, **parts}.items():
            for words, change in wrong.items() if isinstance(tensor, Tensor) else ():
                arguments = operation.arguments()
                try:
                    changed = change(arguments[argument] if not part else getattr(arguments[argument], part))
                except (RuntimeError, IndexError):  # this tensor has no such form
                    continue
                arguments[argument] = replace(arguments[argument], **{part: changed}) if part else changed
                yield f"{argument}.{part}" if part else argument, words, changed, arguments


@pytest.mark.parametrize("operation", [pytest.param(o, id=i) for i, o in zip(named(), OPERATIONS, strict=True)])
def test_messages_name_the_operation_and_the_argument(operation: Operation, seed: int) -> None:
    parameters = inspect.signature(getattr(epiloq, operation.name)).parameters
    own = {*parameters, *operation.arguments(), "sum"}
    optional = {name for name, p in parameters.items() if p.default is None} | {"zero", "perm", "global_scale"}
    refused = 0
    for argument, words, wrong, arguments in with_wrong_tensors(operation):
        where, last = f"{operation.name}, {argument} {words}", argument.rpartition(".")[2]
        if "by_parts" in operation.call.__name__ and (argument.startswith("weight.") or wrong is None):
            continue  # the call takes these parts of the weight as arguments of their own
        try:
            operation.call(**arguments)
        except (ValueError, TypeError) as error:
            message, refused = str(error), refused + 1
            begin = re.match(rf"epiloq\.{operation.name}: (weight\.)?(\w+): ", message)
            assert begin, f"{where}: {message}"
            assert begin[1] or begin[2] in own, f"{where}: {message}"
            assert re.search("expected .*got", message) and "apart from" not in message, f"{where}: {message}"
            if words in NO_TENSORS and wrong is not None:
                names = {*argument.split("."), ANOTHER_NAME.get(last, last)}
                assert begin[2] in names, f"{where}: {message}"
        else:
            assert words not in NO_TENSORS or (wrong is None and last in optional), f"{where} is accepted"
    assert refused > 0


@pytest.mark.parametrize("operation", [pytest.param(o, id=i) for i, o in zip(named(), OPERATIONS, strict=True)])
def test_wrong_values_are_refused_by_name(operation: Operation, seed: int) -> None:
    function = getattr(epiloq, operation.name)
    parameters = inspect.signature(function).parameters
    measured = {"scale", "azp", "scale_ub"} if operation.name.startswith("quantize") else set()
    for name, parameter in parameters.items():
        for wrong in WRONG_VALUES.get(str(parameter.annotation).removesuffix(" | None"), ()):
            arguments = {n: v for n, v in operation.arguments().items() if n in parameters}
            valid = {n: v for n, v in arguments.items() if n not in (*measured, *operation.written, "residual")}
            if wrong is None and parameter.default is None:
                continue
            if operation.name == "quantize_blockwise_int8":
                valid["group_size"] = SIZE
            with pytest.raises((ValueError, TypeError), match=rf"^epiloq\.{operation.name}: {name}: .*expected.*got"):
                function(**valid | {name: wrong})
