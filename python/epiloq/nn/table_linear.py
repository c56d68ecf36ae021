"""TableLinear: a linear layer whose weight is 4-bit places in a table of 16 numbers, with a scale for each block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.nn.prepared_linear import FLOAT_DTYPES, PreparedLinear
from epiloq.nn.quantized_layer import convert_input

ENTRIES = 16
# Weights that are dequantised at once on a CPU: 4 MiB of float32, which caches hold.
_AT_ONCE = 1 << 20


class TableLinear(PreparedLinear):
    """``y = x W^T + bias`` with ``W = table[code] * scale``, as in the NF4 and FP4 of bitsandbytes.

    For inference. W is dequantised in each call: a product in float32, rounded once to the dtype of `x`, some rows at a
    time on a CPU and whole on a GPU, where no kernel has a table yet, so that a call is slower than in floating point
    and takes its memory. `x` is ``[.., in_features]`` in float32, float16 or bfloat16, and `y` ``[.., out_features]``
    in the dtype of `x`.

    block_size
        Weights in a row that share a scale, counted through the rows of the whole weight: a block may go on in the next
        row.

    Parameters without gradients, which are the state dict (N = out_features, K = in_features):
        weight_q      uint8 [ceil(N K / 2)]: weight 2i in the high half of byte i, weight 2i + 1 in the low one
        weight_table  float32 [16]
        weight_scale  float32 [ceil(N K / block_size)]
        bias          [N], of the layer's float dtype; the only one that ``.to(dtype)`` converts

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

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        weight_q, _, table, scales = tensors
        begin, end, size = first * self.in_features, last * self.in_features, self.block_size
        if torch.compiler.is_compiling():
            # inductor (torch 2.13) reads past the end of what is stacked below and cut to an odd length.
            place = torch.arange(begin, end, device=weight_q.device)
            byte = weight_q[place // 2].int()
            values = table[torch.where(place % 2 == 0, byte >> 4, byte & 15)]
        else:
            codes = weight_q[begin // 2 : -(-end // 2)]
            places = torch.stack((codes >> 4, codes & 15), 1).reshape(-1).int()
            values = table.index_select(0, places)[begin % 2 :][: end - begin]
        scale = scales[begin // size : -(-end // size)]
        if begin % size == 0 and end % size == 0:
            values = values.view(-1, size) * scale[:, None]
        else:
            values = values * scale.repeat_interleave(size)[begin % size :][: end - begin]
        rows: Tensor = values.view(last - first, self.in_features)
        return rows

    def _together(self, x: Tensor) -> Iterator[tuple[int, int]]:
        """The rows that are dequantised together."""
        at_once = self.out_features
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            at_once = max(1, _AT_ONCE // self.in_features)
        for first in range(0, self.out_features, at_once):
            yield first, min(first + at_once, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = convert_input(self, x)
        self._check_width(x)
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{self._class()}: x: expected one of {', '.join(map(str, FLOAT_DTYPES))}, got {x.dtype}")
        return self._call(x, self._made)

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        parts = [
            nn.functional.linear(x, self._rows(first, last, *tensors).to(x.dtype)) for first, last in self._together(x)
        ]
        y, bias = parts[0] if len(parts) == 1 else torch.cat(parts, -1), tensors[1]
        return y if bias is None else y + bias.to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block_size={self.block_size}"
        )
