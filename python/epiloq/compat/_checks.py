"""Argument checks that the compatibility modules share; everything else is checked by the operations."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)


def require_int8(operation: str, **tensors: Tensor) -> None:
    """FP8 is a dtype that the imitated functions take too, so it is unsupported rather than wrong."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            continue
        kind = NotImplementedError if str(tensor.dtype).startswith("torch.float8") else ValueError
        raise kind(f"{operation}: {name}: expected torch.int8, the dtype that is implemented, got {tensor.dtype}")


def require_half(operation: str, out_dtype: torch.dtype) -> None:
    if out_dtype not in HALF_DTYPES:
        raise ValueError(f"{operation}: out_dtype: expected torch.bfloat16 or torch.float16, got {out_dtype}")


def require_matrix(operation: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            raise ValueError(f"{operation}: {name}: expected 2 dimensions, got shape {list(tensor.shape)}")


def vector(operation: str, name: str, tensor: Tensor, numel: int) -> Tensor:
    """`tensor` as [numel]; callers keep vectors as [N], [1, N] or [N, 1]."""
    if tensor.numel() != numel:
        raise ValueError(f"{operation}: {name}: expected {numel} elements, got shape {list(tensor.shape)}")
    return tensor.reshape(-1)
