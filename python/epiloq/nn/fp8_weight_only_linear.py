"""Fp8WeightOnlyLinear: a linear layer with FP8 weights and floating-point activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq._torch.calls import DENSE_PRODUCT, refuse_batch_invariant
from epiloq.nn.base.fp8_weight import fp8_weight_product
from epiloq.nn.base.prepared_linear import FP8_BLOCK, K_MULTIPLE, PreparedLinear

# Granularity of `quantize_fp8` for each block.
_GRANULARITIES: dict[tuple[int, ...], str] = {(1, -1): "token", (-1, -1): "tensor", (FP8_BLOCK, FP8_BLOCK): "block"}


class Fp8WeightOnlyLinear(PreparedLinear):
    """``y = x W^T + bias`` with float8_e4m3fn weights and floating-point x; uses `epiloq.fp8_weight_mm`.

    A weight takes one byte in memory, also on GPUs without FP8 tensor cores. For up to 64 tokens W is not rounded,
    and on a GPU a kernel reads FP8 directly; for more tokens W is dequantised in each call. `x` is
    ``[…, in_features]`` in float32, float16 or bfloat16, and `y` ``[…, out_features]`` in the dtype of `x`.

    block
        Rows and columns of W that share a scale, -1 for all: (-1, -1) for the tensor, (1, -1) for channels, (128, 128)
        for DeepSeek's blocks.

    Parameters without gradients, which form the state dict (N = out_features, K = in_features):
        weight_q      uint8 [N, K], the bytes of float8_e4m3fn values
        weight_scale  float32 [ceil(N / rows), ceil(K / columns)]
        bias          [N], of the layer's float dtype; the only parameter that ``.to(dtype)`` converts
    Files store `weight_q` as "weight". `weight` is the dequantised weight, computed on access.
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
        self.block = block[0], block[1]
        shape = (out_features, in_features)
        scales = tuple(1 if size == -1 else -(-whole // size) for size, whole in zip(block, shape, strict=True))
        # The kernel loads 16 columns at once. Padding columns must not need additional scales.
        multiple = K_MULTIPLE if block[1] == -1 or block[1] % K_MULTIPLE == 0 else 1
        self._hold("weight_q", shape, (1, multiple), self.WEIGHT_DTYPE, device)
        self._hold("weight_scale", scales, (1, 1), torch.float32, device)
        self._hold("bias", (out_features,), (1,), dtype, device, wanted=bias)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, *, block: Sequence[int] = (1, -1)) -> Fp8WeightOnlyLinear:
        """Quantise `linear` (which is not changed) to the nearest FP8 weights, on its device (including "meta").

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear`` with finite weights, and for
        a `block` other than (1, -1), (-1, -1) and (128, 128).
        """
        cls.check_convertible(linear, block=block)
        values, layer = linear.weight, cls._like(linear, block=block)
        if not values.is_meta:
            q, scale = epiloq.quantize_fp8(values.contiguous(), granularity=_GRANULARITIES[tuple(block)])
            layer._fill(weight_q=q, weight_scale=scale.view(layer.weight_scale.shape), bias=linear.bias)
        return layer

    @classmethod
    def check_convertible(cls, linear: nn.Module, *, block: Sequence[int] = (1, -1), **options: Any) -> None:
        super().check_convertible(linear)
        if tuple(block) not in _GRANULARITIES:
            expected = ", ".join(map(str, _GRANULARITIES))
            raise ValueError(f"Fp8WeightOnlyLinear: block: expected one of {expected}, got {block!r}")

    def forward(self, input: Tensor) -> Tensor:
        if not is_dynamo_compiling() and (y := _core.fp8_weight_linear(self, input)) is not None:
            return y
        return super().forward(input)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        weight_q, _, scale = tensors
        rows, columns = self.block
        if scale.shape[0] > 1:
            scale = scale[torch.arange(first, last, device=scale.device) // rows]
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(columns, 1)[:, : self.in_features]
        found: Tensor = weight_q[first:last, : self.in_features].to(torch.float32) * scale
        return found

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        refuse_batch_invariant("epiloq.nn.Fp8WeightOnlyLinear", DENSE_PRODUCT)
        weight_q, bias, scale = tensors
        padding = self.padded_in_features - self.in_features
        return fp8_weight_product(x, weight_q, scale, bias, self.block, padding, self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}"
