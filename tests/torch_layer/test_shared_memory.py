"""What an operation writes over what it reads is refused, or gives what memory apart gives; weights have values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq
import operation_arguments as given
from every_operation import OPERATIONS, Operation, named

WRITING = [
    pytest.param(operation, id=name) for name, operation in zip(named(), OPERATIONS, strict=True) if operation.written
]
ALIGNED = 16
is_dense = torch.ops.aten.is_non_overlapping_and_dense


def copies(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if type(value) is Tensor else value for name, value in arguments.items()}


def placed(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """A tensor's values, with its strides, at a byte of the memory."""
    size = tensor.numel() * tensor.element_size()
    there = memory[start : start + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return there.copy_(tensor)


def sharing(arguments: dict[str, Any], written: str, read: str) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The memory and the arguments, where an output begins with an input, and where it begins with its last bytes."""
    one, other = arguments[written], arguments[read]
    sizes = [tensor.numel() * tensor.element_size() for tensor in (one, other)]
    for start in {0, (sizes[1] - 1) // ALIGNED * ALIGNED}:
        memory = torch.zeros(sum(sizes) + 4 * ALIGNED, dtype=torch.uint8)
        out = placed(one, memory, start)
        yield memory, copies(arguments) | {written: out, read: placed(other, memory, 0)}


@pytest.mark.parametrize("operation", WRITING)
def test_outputs_over_inputs(operation: Operation, seed: int) -> None:
    arguments = operation.arguments()
    apart = copies(arguments)
    operation.call(**apart)
    dense = [name for name, value in arguments.items() if type(value) is Tensor and value.numel() and is_dense(value)]
    for written in operation.written:
        for read in (name for name in dense if name not in operation.written and written in dense):
            for memory, shared in sharing(arguments, written, read):
                before = memory.clone()
                try:
                    operation.call(**shared)
                except ValueError as error:
                    name = {"total": "sum", "q": "(q|out)"}.get(written, written)
                    assert re.search(f": {name}: ", str(error)) and torch.equal(memory, before), (written, read)
                else:
                    for name in operation.written:
                        assert torch.equal(shared[name], apart[name]), (written, read, name)


def test_outputs_over_experts_weights(seed: int) -> None:
    arguments = given.grouped_packed()
    out = arguments["out"]
    scale = arguments["weight"].scale
    memory = torch.zeros(scale.nbytes + out.nbytes, dtype=torch.uint8)
    arguments["weight"] = replace(arguments["weight"], scale=placed(scale, memory, out.nbytes - ALIGNED))
    with pytest.raises(ValueError, match=r"grouped_packed_mm: out: expected memory apart from weight\.scale's"):
        epiloq.grouped_packed_mm(**arguments | {"out": memory[: out.nbytes].view(out.dtype).view(out.shape)})


def test_an_activation_order_without_values_is_refused(seed: int) -> None:
    """As a layer has it of which a part is still on the meta device: torch selects anything by such an index."""
    for call, arguments in ((given.packed_by_parts, given.packed_parts()), (given.w4a8_by_parts, given.w4a8_parts())):
        arguments["perm"] = torch.arange(given.SIZE, device="meta")
        with pytest.raises(ValueError, match=r"weight\.perm: expected a tensor with values on cpu"):
            call(**arguments)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (1, 2, 3, 4, 5), ()])
def test_an_image_of_other_dimensions_is_no_output(shape: tuple[int, ...], seed: int) -> None:
    layer = epiloq.nn.WeightOnlyConv2d.from_conv2d(torch.nn.Conv2d(3, 16, 1), bits=8)
    for ask in (epiloq.conv2d_weight_only, lambda *a, **o: epiloq.explain("conv2d_weight_only", *a, **o)):
        with pytest.raises(ValueError, match=r"conv2d_weight_only: out: expected \[B, Co, P, Q\]"):
            ask(torch.randn(1, 3, 5, 5), layer.packed, out=torch.empty(shape))
