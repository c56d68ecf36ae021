"""Fp8WeightOnlyLinear: a linear layer with FP8 weights, dequantised as it runs, and floating-point activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from epiloq._torch.library import DENSE_PRODUCT, refuse_batch_invariant
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES, PreparedLinear
from epiloq.nn.base.quantized_layer import convert_input


class Fp8WeightOnlyLinear(PreparedLinear):
    """``y = x W^T + bias`` with float8_e4m3fn W, dequantised to the dtype of `x` in each call, and x as it is.

    For inference with checkpoints whose activations stay in floating point, or whose blocks no kernel multiplies: a
    weight takes a byte in memory, and a call dequantises it before a product in floating point. `x` is
    ``[.., in_features]`` in float32, float16 or bfloat16, and `y` ``[.., out_features]`` in the dtype of `x`.

    block
        Rows and columns of W that share a scale, -1 for all: (-1, -1) for the tensor, (1, -1) for channels.

    Parameters without gradients, which are the state dict (N = out_features, K = in_features):
        weight_q      uint8 [N, K], the bytes of float8_e4m3fn values
        weight_scale  float32 [ceil(N / rows), ceil(K / columns)]
        bias          [N], of the layer's float dtype; the only one that ``.to(dtype)`` converts
    Files have `weight_q` under "weight". `weight` is the float weight that these stand for, computed when it is read.
    """

    WEIGHT_DTYPE = torch.float8_e4m3fn
    PARTS = ("weight_q", "bias", "weight_scale")

    weight_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        block: Sequence[int] = (-1, -1),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        if len(block) != 2 or not all(type(size) is int and (size == -1 or size > 0) for size in block):
            raise ValueError(f"{self._class()}: block: expected rows and columns, -1 for all, got {block!r}")
        self.block = tuple(block)
        shape = (out_features, in_features)
        scales = tuple(1 if size == -1 else -(-whole // size) for size, whole in zip(block, shape, strict=True))
        self._hold("weight_q", shape, (1, 1), self.WEIGHT_DTYPE, device)
        self._hold("weight_scale", scales, (1, 1), torch.float32, device)
        self._hold("bias", (out_features,), (1,), dtype, device, wanted=bias)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        weight_q, _, scale = tensors
        rows, columns = self.block
        if scale.shape[0] > 1:
            scale = scale[torch.arange(first, last, device=scale.device) // rows]
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(columns, 1)[:, : self.in_features]
        found: Tensor = weight_q[first:last].to(torch.float32) * scale
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = convert_input(self, x)
        self._check_width(x)
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{self._class()}: x: expected one of {', '.join(map(str, FLOAT_DTYPES))}, got {x.dtype}")
        return self._call(x, self._made)

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        refuse_batch_invariant("epiloq.nn.Fp8WeightOnlyLinear", DENSE_PRODUCT)
        weight, bias = self._rows(0, self.out_features, *tensors).to(x.dtype), tensors[1]
        return nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block={self.block}"
        )
