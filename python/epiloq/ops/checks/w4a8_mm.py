"""What `w4a8_mm` refuses, before anything is computed or written."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from epiloq.weights.packed_layout import shapes_of
from epiloq.weights.packed_weight import SCALE_DTYPES, PackedWeight

NAME = "w4a8_mm"
ACTIVATIONS = (torch.int8, torch.float8_e4m3fn)
_HALVES = (torch.float16, torch.bfloat16)
_MOST_DIMENSIONS = 6


class Call(NamedTuple):
    """The tensors of a call."""

    out: Tensor
    x_q: Tensor
    weight: PackedWeight
    scale_a: Tensor
    bias: Tensor | None


def check_weight(weight: PackedWeight, operation: str = NAME) -> None:
    """Raise ValueError for a weight of another kind than the product takes."""
    if weight.bits != 4:
        _refuse("weight", "4 bits", f"{weight.bits}", operation)
    if weight.offset is not None:
        _refuse("weight.offset", "None: symmetric weights or integer zero points", "real offsets", operation)


def check_out_dtype(x_q: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for an output of another type than there are."""
    if dtype not in (_HALVES if x_q.is_cuda else (*_HALVES, torch.float32)):
        expected = "float16 or bfloat16" if x_q.is_cuda else "float16, bfloat16 or float32"
        _refuse("out_dtype", expected, dtype)


def check(call: Call, out_given: bool) -> None:
    """Raise ValueError, which names the argument, unless everything fits."""
    _check_parts(call.weight, call.x_q.device)
    leading, m = _check_activations(call)
    scale_a, bias, out = call.scale_a, call.bias, call.out
    shapes = [torch.Size(shape) for shape in ((m,), (m, 1), (*leading, 1))]
    if scale_a.dtype != torch.float32 or (scale_a.numel() != 1 and scale_a.shape not in shapes):
        _refuse("scale_a", f"float32, one element or one for each of {m} rows ([{m}] or [{m}, 1])", _said(scale_a))
    check_memory("scale_a", scale_a, call.x_q.device)
    if out_given:
        _check_out(out, (*leading, call.weight.n))
    if bias is not None:
        if bias.dtype != out.dtype or bias.shape != (call.weight.n,) or not bias.is_contiguous():
            _refuse("bias", f"the output's {out.dtype} [{call.weight.n}], dense", _said(bias))
        check_memory("bias", bias, call.x_q.device)
    if out_given:
        check_memory("out", out, call.x_q.device)
        inputs = {"x_q": call.x_q, "scale_a": scale_a, "bias": bias}
        inputs |= {f"weight.{name}": tensor for name, tensor in call.weight.state_dict().items()}
        for name, tensor in inputs.items():
            if tensor is not None and _overlap(out, tensor):
                _refuse("out", f"memory apart from {name}'s", "an overlap")


def _check_parts(weight: PackedWeight, device: torch.device) -> None:
    expected = shapes_of(4, weight.n, weight.k, weight.group_size)
    kinds = {"q": (torch.uint8,), "scale": SCALE_DTYPES, "zero": (torch.uint8,), "perm": (torch.int64,)}
    for name, tensor in weight.state_dict().items():
        if tensor.shape != expected[name] or tensor.dtype not in kinds[name] or not tensor.is_contiguous():
            wanted = " or ".join(map(str, kinds[name]))
            _refuse(f"weight.{name}", f"{wanted} {list(expected[name])}, dense", _said(tensor))
        check_memory(f"weight.{name}", tensor, device)


def _check_activations(call: Call) -> tuple[torch.Size, int]:
    """Dimensions before the columns, and how many rows they are."""
    x_q, k = call.x_q, call.weight.k
    if x_q.dtype not in ACTIVATIONS:
        _refuse("x_q", "int8 or float8_e4m3fn", _said(x_q))
    if not 1 <= x_q.ndim <= _MOST_DIMENSIONS or x_q.shape[-1] != k:
        _refuse("x_q", f"{k} columns and 1 to {_MOST_DIMENSIONS} dimensions", _said(x_q))
    check_memory("x_q", x_q, x_q.device)
    _check_rows("x_q", x_q)
    return x_q.shape[:-1], prod(x_q.shape[:-1])


def _check_out(out: Tensor, shape: tuple[int, ...]) -> None:
    if out.dtype not in (*_HALVES, torch.float32) or (out.is_cuda and out.dtype == torch.float32):
        _refuse("out", "float16, bfloat16 or, on the CPU, float32", _said(out))
    if out.shape != shape:
        _refuse("out", f"x_q's leading dimensions and {shape[-1]} columns", _said(out))
    _check_rows("out", out)
    rows = out.view(prod(shape[:-1]), shape[-1]) if out.numel() else out
    if out.numel() and len(rows) > 1 and rows.stride(0) < shape[-1]:
        _refuse("out", "rows that do not overlap", _said(out))


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        _refuse(name, "row-major memory, rows dense", _said(tensor))
    strides, sizes = tensor.stride(), tensor.shape
    outer = [i for i in range(tensor.ndim - 1) if sizes[i] != 1]
    if tensor.numel() and any(strides[i] != strides[j] * sizes[j] for i, j in pairwise(outer)):
        _refuse(name, "leading dimensions that collapse into one", _said(tensor))


def check_memory(name: str, tensor: Tensor, device: torch.device, operation: str = NAME) -> None:
    """Raise ValueError for a tensor on another device, or without memory."""
    if tensor.layout != torch.strided:
        _refuse(name, "strided memory", f"{tensor.layout}", operation)
    if tensor.device != device or tensor.is_meta:
        _refuse(name, f"a tensor with values on {device}", f"one on {tensor.device}", operation)
    if tensor.numel() and (tensor._is_zerotensor() or tensor.untyped_storage().nbytes() == 0):
        _refuse(name, "memory", f"{_said(tensor)} without any", operation)


def _overlap(one: Tensor, other: Tensor) -> bool:
    begin, end = _span(one)
    first, last = _span(other)
    return begin < last and first < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and behind its last."""
    if tensor.numel() == 0:
        return 0, 0
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.itemsize


def _said(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = f" of strides {tensor.stride()}" if tensor.layout == torch.strided else ""
    return f"{dtype} {list(tensor.shape)}{strides}"


def _refuse(argument: str, expected: object, got: object, operation: str = NAME) -> NoReturn:
    raise ValueError(f"epiloq.{operation}: {argument}: expected {expected}, got {got}")
