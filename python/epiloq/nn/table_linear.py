"""TableLinear: a linear layer with 4-bit indices into a table of 16 numbers and a scale per block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq.nn.base.dense_rows import dense_rows
from epiloq.nn.base.prepared_linear import PreparedLinear
from epiloq.ops.table_mm import dequantized

ENTRIES = 16


class TableLinear(PreparedLinear):
    """``y = x W^T + bias`` with ``W = table[code] * scale``, as in the NF4 and FP4 of bitsandbytes.

    Uses `epiloq.table_mm`: for up to 64 tokens on a GPU, and 8 on a CPU, a kernel reads the codes directly; otherwise W
    is dequantised in each call and rounded once to the dtype of `x`, a few rows at a time on a CPU and as a whole on a
    GPU. `x` is
    ``[…, in_features]`` in float32, float16 or bfloat16, and `y` ``[…, out_features]`` in the dtype of `x`.

    block_size
        Number of consecutive weights that share a scale, counted across the rows of the whole weight: a block may
        continue in the next row.

    Parameters without gradients, which form the state dict (N = out_features, K = in_features):
        weight_q      uint8 [ceil(N K / 2)]: weight 2i in the high half of byte i, weight 2i + 1 in the low one
        weight_table  float32 [16]
        weight_scale  float32 [ceil(N K / block_size)]
        bias          [N], of the layer's float dtype; the only parameter that ``.to(dtype)`` converts

    Raises ValueError for sizes below 1.
    """

    WEIGHT_DTYPE = torch.uint8
    PARTS = ("weight_q", "bias", "weight_table", "weight_scale")

    weight_table: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        block_size: int = 64,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        if type(block_size) is not int or block_size < 1:
            raise ValueError(f"{self._class()}: block_size: expected at least 1, got {block_size!r}")
        self.block_size, count = block_size, out_features * in_features
        self._hold("weight_q", (-(-count // 2),), (1,), self.WEIGHT_DTYPE, device)
        self._hold("weight_table", (ENTRIES,), (1,), torch.float32, device)
        self._hold("weight_scale", (-(-count // block_size),), (1,), torch.float32, device)
        self._hold("bias", (out_features,), (1,), dtype, device, wanted=bias)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[N, K]``: products in float32, rounded once to `dtype`."""
        return self.dequantized_weight().to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        if not is_dynamo_compiling() and (y := _core.table_linear(self, input)) is not None:
            return y
        return super().forward(input)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        weight_q, _, table, scale = tensors
        return dequantized(weight_q, table, scale, self.in_features, self.block_size, slice(first, last))

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        weight_q, bias, table, scale = tensors
        bias = None if bias is None else bias.to(x.dtype)
        rows = dense_rows(x.reshape(-1, self.in_features))
        y = epiloq.table_mm(
            rows, weight_q, table, scale, bias, out_features=self.out_features, block_size=self.block_size
        )
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}"
