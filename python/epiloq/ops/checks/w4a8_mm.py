"""Argument checks of `w4a8_mm`."""

from __future__ import annotations

from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from epiloq.weights.fp4 import FORMATS
from epiloq.weights.packed_fp4_weight import PackedFp4Weight, shapes_of_parts
from epiloq.weights.packed_layout import shapes_of
from epiloq.weights.packed_weight import SCALE_DTYPES, PackedWeight
from epiloq.weights.tensor_checks import check_apart, check_memory, check_rows, check_written, described, refuse

NAME = "w4a8_mm"
ACTIVATIONS = (torch.int8, torch.float8_e4m3fn)
Weight: TypeAlias = PackedWeight | PackedFp4Weight
GROUP = 128
"""Columns of a token that share a scale where a token has several."""
_HALVES = (torch.float16, torch.bfloat16)
_MOST_DIMENSIONS = 6


class Call(NamedTuple):
    """The tensors of a call."""

    out: Tensor
    x_q: Tensor
    weight: Weight
    scale_a: Tensor
    bias: Tensor | None


def check_weight(weight: Weight, operation: str = NAME) -> None:
    """Raise ValueError for an unsupported kind of weight."""
    if isinstance(weight, PackedFp4Weight):
        if weight.format not in FORMATS:
            refuse(operation, "weight.format", f"one of {', '.join(FORMATS)}", repr(weight.format))
        return
    if weight.bits != 4:
        refuse(operation, "weight", "4 bits", f"{weight.bits}")
    if weight.offset is not None:
        refuse(operation, "weight.offset", "None: symmetric weights or integer zero points", "real offsets")


def groups_of(k: int) -> int:
    """Number of scales of a token of `k` columns with a scale per group."""
    return max(-(-k // GROUP), 1)


def check_out_dtype(x_q: Tensor, dtype: torch.dtype, operation: str = NAME, argument: str = "out_dtype") -> None:
    """Raise ValueError for an unsupported output type."""
    if dtype not in (_HALVES if x_q.is_cuda else (*_HALVES, torch.float32)):
        expected = "float16 or bfloat16" if x_q.is_cuda else "float16, bfloat16 or float32"
        refuse(operation, argument, expected, dtype)


def check(call: Call, out_given: bool) -> None:
    """Raise ValueError, which names the argument, if one is invalid."""
    check_parts(call.weight, call.x_q.device)
    leading, m = _check_activations(call)
    scale_a, bias, out = call.scale_a, call.bias, call.out
    groups = groups_of(call.weight.k)
    shapes = [torch.Size(shape) for g in (1, groups) for shape in ((m, g), (*leading, g))]
    check_memory("scale_a", scale_a, call.x_q.device, NAME)
    if scale_a.dtype != torch.float32 or (scale_a.numel() != 1 and scale_a.shape not in (*shapes, (m,))):
        by_group = f", or for each group of {GROUP} columns ([{m}, {groups}])" if groups > 1 else ""
        expected = f"float32, one element or one for each of {m} rows ([{m}] or [{m}, 1]){by_group}"
        refuse(NAME, "scale_a", expected, described(scale_a))
    if out_given:
        check_memory("out", out, call.x_q.device, NAME)
        _check_out(out, (*leading, call.weight.n))
    if bias is not None:
        check_memory("bias", bias, call.x_q.device, NAME)
        if bias.dtype != out.dtype or bias.shape != (call.weight.n,) or not bias.is_contiguous():
            refuse(NAME, "bias", f"the output's {out.dtype} [{call.weight.n}], dense", described(bias))
    if out_given:
        inputs: dict[str, Tensor | None] = {"x_q": call.x_q, "scale_a": scale_a, "bias": bias}
        inputs |= {f"weight.{name}": tensor for name, tensor in call.weight.state_dict().items()}
        check_apart(out, inputs, NAME)


def check_parts(weight: Weight, device: torch.device, matrices: int = 1, operation: str = NAME) -> None:
    """Raise ValueError for tensors of other types or sizes than those of a weight that stacks `matrices`."""
    expected: dict[str, tuple[int, ...]]
    kinds: dict[str, tuple[torch.dtype, ...]]
    if isinstance(weight, PackedFp4Weight):
        factor = weight.global_scale
        factors = 1 if factor is None or factor.numel() == 1 else matrices
        expected = {**shapes_of_parts(weight.format, weight.n, weight.k), "global_scale": (factors,)}
        kinds = {"q": (torch.uint8,), "scale": (torch.uint8,), "global_scale": (torch.float32,)}
    else:
        expected = shapes_of(weight.bits, weight.n, weight.k, weight.group_size)
        kinds = {"q": (torch.uint8,), "scale": SCALE_DTYPES, "zero": (torch.uint8,), "perm": (torch.int64,)}
        kinds["offset"] = (weight.scale.dtype,)
    for name, tensor in weight.state_dict().items():
        check_memory(f"weight.{name}", tensor, device, operation)
        if tensor.shape != expected[name] or tensor.dtype not in kinds[name] or not tensor.is_contiguous():
            wanted = " or ".join(map(str, kinds[name]))
            refuse(operation, f"weight.{name}", f"{wanted} {list(expected[name])}, dense", described(tensor))


def _check_activations(call: Call) -> tuple[torch.Size, int]:
    """The leading dimensions, and the number of rows."""
    x_q, k = call.x_q, call.weight.k
    if x_q.dtype not in ACTIVATIONS:
        refuse(NAME, "x_q", "int8 or float8_e4m3fn", described(x_q))
    if not 1 <= x_q.ndim <= _MOST_DIMENSIONS or x_q.shape[-1] != k:
        refuse(NAME, "x_q", f"{k} columns and 1 to {_MOST_DIMENSIONS} dimensions", described(x_q))
    check_memory("x_q", x_q, x_q.device, NAME)
    check_rows("x_q", x_q, NAME)
    return x_q.shape[:-1], prod(x_q.shape[:-1])


def _check_out(out: Tensor, shape: tuple[int, ...]) -> None:
    if out.dtype not in (*_HALVES, torch.float32) or (out.is_cuda and out.dtype == torch.float32):
        refuse(NAME, "out", "float16, bfloat16 or, on the CPU, float32", described(out))
    if out.shape != shape:
        refuse(NAME, "out", f"x_q's leading dimensions and {shape[-1]} columns", described(out))
    check_written(out, shape, NAME)
