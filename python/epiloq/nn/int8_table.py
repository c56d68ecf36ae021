"""Operations between int8 layers: quantisation, and elementwise functions from one int8 grid to another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import epiloq
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.quantized_layer import expect_dense
from epiloq.nn.base.stored_tensors import StoredTensors
from epiloq.weights.prepared_int8_weight import Quantizer


class Int8Quantize(StoredTensors):
    """``q = clamp(round(x / scale) + zero_point, -128, 127)`` of a floating-point x; see ``epiloq.quantize_int8``.

    Four-dimensional results are in channels_last memory. Parameters without gradients: scale float32 [1],
    zero_point int32 [1].
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, output: Quantizer, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._store("scale", torch.tensor([output[0]], dtype=torch.float32, device=device))
        self._store("zero_point", torch.tensor([output[1]], dtype=torch.int32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x):
            return as_leaf(self, x)
        expect_dense(self, x)
        rows = x.permute(0, 2, 3, 1).contiguous() if x.ndim == 4 else x.contiguous()
        q, *_ = epiloq.quantize_int8(rows, scale=self.scale, azp=self.zero_point)
        return q.permute(0, 3, 1, 2) if x.ndim == 4 else q


class Int8Table(StoredTensors):
    """``table[q + 128]`` for int8 q: an elementwise function between two grids. Stored: table int8 [256]."""

    table: Tensor

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._store("table", torch.arange(-128, 128, dtype=torch.int8, device=device))

    @classmethod
    def from_function(
        cls,
        function: Callable[[Tensor], Tensor],
        *,
        input: Quantizer,
        output: Quantizer,
        device: torch.device | str | None = None,
    ) -> Int8Table:
        """Table of the quantised ``function`` of each dequantised value, computed in float32. `input` and `output`
        are (scale, zero point). The function must be elementwise.
        """
        layer = cls(device)
        layer.table.copy_(quantized(function((torch.arange(-128, 128) - input[1]) * input[0]), output))
        return layer

    def forward(self, q: Tensor) -> Tensor:
        if is_symbolic(q):
            return as_leaf(self, q)
        return epiloq.lookup_int8(q, self.table)


def quantized(values: Tensor, grid: Quantizer) -> Tensor:
    """float32 ``[n]`` quantised with (scale, zero point), on the CPU."""
    scale, zero = torch.tensor([grid[0]]), torch.tensor([grid[1]], dtype=torch.int32)
    return epiloq.quantize_int8(values.float(), scale=scale, azp=zero)[0]
