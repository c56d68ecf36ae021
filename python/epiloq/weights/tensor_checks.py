"""Memory checks of tensors, for operations that are checked in Python."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Identity = tuple[object, ...]


def refuse(operation: str, argument: str, expected: object, got: object) -> NoReturn:
    """Raise ValueError that names the operation and the argument."""
    raise ValueError(f"epiloq.{operation}: {argument}: expected {expected}, got {got}")


def described(tensor: Tensor) -> str:
    """Describe dtype, shape and strides, for messages."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = f" of strides {tensor.stride()}" if tensor.layout == torch.strided else ""
    return f"{dtype} {list(tensor.shape)}{strides}"


def check_memory(name: str, tensor: Tensor, device: torch.device, operation: str) -> None:
    """Raise ValueError for a tensor on another device, or without memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        refuse(operation, name, "a dense tensor (torch.strided)", "a nested one" if tensor.is_nested else tensor.layout)
    if tensor.device != device or tensor.is_meta:
        refuse(operation, name, f"a tensor with values on {device}", f"one on {tensor.device}")
    if tensor.numel() and (tensor._is_zerotensor() or tensor.untyped_storage().nbytes() == 0):
        got = f"{described(tensor)} without any (its storage was freed, or never allocated)"
        refuse(operation, name, "memory", got)


def check_rows(name: str, tensor: Tensor, operation: str) -> None:
    """Raise ValueError unless rows are dense and leading dimensions collapse into one."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(operation, name, "row-major memory, contiguous rows", described(tensor))
    strides, sizes = tensor.stride(), tensor.shape
    outer = [i for i in range(tensor.ndim - 1) if sizes[i] != 1]
    if tensor.numel() and any(strides[i] != strides[j] * sizes[j] for i, j in pairwise(outer)):
        refuse(operation, name, "leading dimensions that collapse into one", described(tensor))


def check_written(out: Tensor, shape: tuple[int, ...], operation: str) -> None:
    """Raise ValueError unless ``out`` has this shape and rows that do not overlap."""
    if out.shape != shape:
        refuse(operation, "out", f"{list(shape)}", described(out))
    check_rows("out", out, operation)
    if out.numel() > shape[-1] and out.view(-1, shape[-1]).stride(0) < shape[-1]:
        refuse(operation, "out", "rows that do not overlap", described(out))


def check_apart(out: Tensor, inputs: Mapping[str, Tensor | None], operation: str) -> None:
    """Raise ValueError if ``out`` shares memory with an input."""
    for name, read in inputs.items():
        if read is not None and overlap(out, read):
            refuse(operation, "out", f"memory apart from {name}'s", "an overlap")


def check_output_of(x: Tensor, out: Tensor, columns: int, inputs: Mapping[str, Tensor | None], operation: str) -> None:
    """Raise ValueError unless an output has x's type, its leading dimensions and so many columns, and memory apart from
    the inputs'."""
    check_memory("out", out, x.device, operation)
    if out.dtype != x.dtype:
        refuse(operation, "out", f"x's {x.dtype}", described(out))
    check_written(out, (*x.shape[:-1], columns), operation)
    check_apart(out, inputs, operation)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory between two tensors' first and last bytes overlaps."""
    begin, end = _span(one)
    first, last = _span(other)
    return begin < last and first < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the byte after its last."""
    if tensor.numel() == 0:
        return 0, 0
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.itemsize


def identity(tensor: Tensor) -> Identity:
    """Identity of a tensor's elements: equal for tensors with the same memory, shape and strides (one parameter, or two
    tied through ``.data``). A tensor without dense local memory (unallocated, freed, sparse, distributed) is identical
    only to itself."""
    if is_lazy(tensor) or is_traceable_wrapper_subclass(tensor):
        return "object", id(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return "object", id(tensor)
    elements = (tensor.dtype, tensor.shape, tensor.stride())
    if tensor.is_meta:
        return "meta", tensor.untyped_storage()._cdata, tensor.storage_offset(), *elements
    address = tensor.data_ptr()
    return (tensor.device, address, *elements) if address else ("object", id(tensor))
