"""Random tensors of other engines' layouts: every bit pattern that they may have."""

from __future__ import annotations

import torch
from torch import Tensor


def words(*shape: int) -> Tensor:
    """int32 of any bits."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) * 0.02 + 1e-3).to(dtype)


def awq_tensors(version: str, n: int, k: int, group_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    length = k if group_size == -1 else group_size
    count = k // length
    if version == "gemm":
        return {"qweight": words(k, n // 8), "qzeros": words(count, n // 8), "scales": scales(count, n, dtype=dtype)}
    width = 8 * {32: 4, 64: 2}.get(length, 1)
    padded = -(-count // width) * width
    filled = torch.nn.functional.pad(scales(n, count, dtype=dtype), (0, padded - count))
    if version == "gemv":
        zeros = words(n, padded // 8)
        for group in range(count, padded):
            zeros[:, group // 8] &= ~(15 << group % 8 * 4) if group % 8 < 7 else 0x0FFFFFFF
        return {"qweight": words(n, k // 8), "qzeros": zeros, "scales": filled}
    offsets = torch.nn.functional.pad(-torch.rand(n, count).to(dtype), (0, padded - count))
    tensors = {"qweight": words(n // 4, k // 2).view(torch.int16), "scales": filled.t(), "qzeros": offsets.t()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
