"""Sparse, nested, oneDNN's and torch's own quantised tensors are refused by name, for every operation and argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import every_layer
import operation_arguments as given_arguments
from every_operation import OPERATIONS, Operation, named

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.to_sparse_csr(),
    "sparse_bsr": lambda t: t.to_sparse_bsr((1, 1)),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "quint8": lambda t: torch.quantize_per_tensor(t.float().contiguous(), 0.1, 0, torch.quint8),
}
REFUSED = (ValueError, TypeError, NotImplementedError)


def changed(kind: str, tensor: Tensor) -> Tensor | None:
    """The tensor in another layout; None where torch has none of its type or dimensions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all of these are "in beta"
            return KINDS[kind](tensor)
    except (RuntimeError, IndexError):
        return None


def altered(kind: str, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments, once for each tensor among them, by its name, which has the other layout."""
    found = {}
    for name, value in arguments.items():
        if type(value) is Tensor and (other := changed(kind, value)) is not None:
            found[name] = arguments | {name: other}
        if is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                part = getattr(value, field.name)
                if type(part) is Tensor and (other := changed(kind, part)) is not None:
                    found[f"{name}.{field.name}"] = arguments | {name: replace(value, **{field.name: other})}
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", [pytest.param(o, id=n) for n, o in zip(named(), OPERATIONS, strict=True)])
def test_other_layouts_are_refused_by_name(operation: Operation, kind: str, seed: int) -> None:
    given = operation.arguments()
    by_parts = operation.call in (given_arguments.packed_by_parts, given_arguments.w4a8_by_parts)
    names = {"q": "(q|out)", "values": "w_q", "parameters": "w_scale", "total": "sum"}
    for name, other in altered(kind, given).items():
        if by_parts and name.startswith("weight"):
            continue
        leaf = name.rpartition(".")[2]
        expected = rf"^epiloq\.{operation.name}: (weight\.|x_|w_)?{names.get(leaf, leaf)}: "
        if kind in ("quint8", "mkldnn"):  # of another type, for which another argument may be what does not fit
            expected = r"^epiloq\.\w+: \w+(\.\w+)?: "
        with pytest.raises(REFUSED, match=expected):
            operation.call(**other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", every_layer.LAYERS)
def test_layers_refuse_inputs_of_other_layouts(name: str, kind: str, seed: int) -> None:
    layer, (x, *rest) = every_layer.LAYERS[name](64, 48), every_layer.arguments(name, 64)
    other = changed(kind, x)
    if other is not None:
        with pytest.raises(REFUSED, match=r"expected|must be"):
            every_layer.run(name, layer, (other, *rest))
