"""Argument checks shared by the compatibility modules; everything else is checked by the operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from epiloq.nn.base.dense_rows import dense_rows

HALF_DTYPES = (torch.bfloat16, torch.float16)
INT8 = (torch.int8,)
FP8 = (torch.float8_e4m3fn,)


def _require_tensor(operation: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{operation}: {name}: expected a tensor, got {type(value).__name__}")


def require_dtype(operation: str, dtypes: tuple[torch.dtype, ...], **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        _require_tensor(operation, name, tensor)
        if tensor.dtype not in dtypes:
            raise ValueError(f"{operation}: {name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def require_half(operation: str, out_dtype: torch.dtype) -> None:
    if out_dtype not in HALF_DTYPES:
        raise ValueError(f"{operation}: out_dtype: expected torch.bfloat16 or torch.float16, got {out_dtype}")


def require_matrix(operation: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        _require_tensor(operation, name, tensor)
        if tensor.dim() != 2:
            raise ValueError(f"{operation}: {name}: expected 2 dimensions, got shape {list(tensor.shape)}")


def vector(operation: str, name: str, tensor: Tensor, numel: int) -> Tensor:
    """`tensor` as [numel]; callers keep vectors as [N], [1, N] or [N, 1]."""
    _require_tensor(operation, name, tensor)
    if tensor.numel() != numel:
        raise ValueError(f"{operation}: {name}: expected {numel} elements, got shape {list(tensor.shape)}")
    return tensor.reshape(-1)


def rows_apart(operation: str, name: str, x: Tensor) -> Tensor:
    """`x` […, K] with contiguous rows that do not overlap: itself, or a copy if its memory has another order."""
    _require_tensor(operation, name, x)
    if x.dim() == 0:
        raise ValueError(f"{operation}: {name}: expected shape […, K], got a scalar")
    return dense_rows(x)


def groups_of(operation: str, name: str, x: Tensor, group_size: int) -> Tensor:
    """`x` […, K] as [rows and groups, group_size], a view."""
    _require_tensor(operation, name, x)
    if x.dim() == 0 or group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(
            f"{operation}: {name}: expected rows of whole groups of {group_size} elements, got shape {list(x.shape)}"
        )
    if not x.is_contiguous():
        raise ValueError(f"{operation}: {name}: expected a contiguous tensor, got strides {x.stride()}")
    return x.view(math.prod(x.shape) // group_size, group_size)
