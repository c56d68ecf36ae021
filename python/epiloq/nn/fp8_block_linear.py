"""Fp8BlockLinear: a linear layer as in DeepSeek-V3, FP8 weights in blocks and activations in groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq._torch.devices import multiplies_float8
from epiloq.nn.base.fp8_tokens import fp8_tokens
from epiloq.nn.base.fp8_weight import fp8_weight_product
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.prepared_linear import FP8_BLOCK, K_MULTIPLE, N_MULTIPLE, PreparedLinear
from epiloq.nn.base.quantized_layer import convert_input


class Fp8BlockLinear(PreparedLinear):
    """``y = x W^T + bias`` with float8_e4m3fn weights, a scale per 128 x 128 block, and x quantised to FP8.

    `x` is ``[…, in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` is
    contiguous ``[…, out_features]`` in the dtype of `x`. Each group of 128 values of a token has a dynamic scale, see
    ``epiloq.quantize_fp8``; the product is ``epiloq.groupwise_mm``. On GPUs without FP8
    tensor cores (below compute capability 8.9) x is not quantised: `epiloq.fp8_weight_mm`.

    rows
        Number of rows of W that share a scale for 128 columns: 128 or 1.

    Parameters without gradients, which form the state dict (N = out_features, K = in_features):
        weight_q          uint8 [N, K], the bytes of float8_e4m3fn values, W / scale rounded to nearest, ties to even
        weight_scale_inv  float32 [ceil(N / rows), ceil(K / 128)], the scale, max|W| / 448 of the block, at least 2^-126
        bias              [N], of the layer's float dtype; the only parameter that ``.to(dtype)`` converts
    Files, such as DeepSeek-V3's checkpoints, store `weight_q` as "weight" in float8_e4m3fn. `weight` is the
    dequantised weight, computed on access. Kernels need N padded to a multiple of 8 and K to one of 16: for other
    sizes they read padded copies, and an out_features that is not a multiple of 8 costs one copy of `y`.
    """

    WEIGHT_DTYPE = torch.float8_e4m3fn
    PARTS = ("weight_q", "bias", "weight_scale_inv")

    weight_scale_inv: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        rows: int = FP8_BLOCK,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        if rows not in (1, FP8_BLOCK):
            raise ValueError(f"Fp8BlockLinear: rows: expected 1 or {FP8_BLOCK}, got {rows!r}")
        self.rows = rows
        blocks = (-(-out_features // rows), -(-in_features // FP8_BLOCK))
        self._hold("weight_q", (out_features, in_features), (N_MULTIPLE, K_MULTIPLE), self.WEIGHT_DTYPE, device)
        self._hold("weight_scale_inv", blocks, (N_MULTIPLE if rows == 1 else 1, 1), torch.float32, device)
        self._hold("bias", (out_features,), (N_MULTIPLE,), dtype, device, wanted=bias)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear) -> Fp8BlockLinear:
        """Quantise `linear` (which is not changed) to the nearest FP8 weights, on its device (including "meta").

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear`` with finite weights.
        """
        cls.check_convertible(linear)
        values, layer = linear.weight, cls._like(linear)
        if not values.is_meta:
            q, scale = epiloq.quantize_fp8(values.contiguous(), granularity="block", pad_to=K_MULTIPLE)
            layer._fill(weight_q=q, weight_scale_inv=scale, bias=linear.bias)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        if not is_dynamo_compiling() and (y := _core.fp8_block_linear(self, input)) is not None:
            return y
        if is_symbolic(input):
            return as_leaf(self, input)
        return self._call(convert_input(self, input), self._made)

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        weight_q, bias, weight_scale_inv = tensors
        if not multiplies_float8(x.device):
            self._check_width(x)
            padding, block = self.padded_in_features - self.in_features, (self.rows, FP8_BLOCK)
            return fp8_weight_product(x, weight_q, weight_scale_inv, bias, block, padding, self.out_features)
        q, scale = fp8_tokens(self._tokens(x), "group", scale_layout="column")
        bias = None if bias is None else bias.to(x.dtype)
        y = epiloq.groupwise_mm(
            q,
            weight_q.t(),
            scale,
            weight_scale_inv.t(),
            bias,
            recipe=(1, self.rows, FP8_BLOCK),
            out_dtype=x.dtype,
            constant_b=True,
        )
        return self._result(y, x)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        weight_q, _, weight_scale_inv = tensors
        return rows_of_blocks(first, last, self.in_features, weight_q, weight_scale_inv, self.rows)

    def extra_repr(self) -> str:
        rows = "" if self.rows == FP8_BLOCK else f", rows={self.rows}"
        return f"{super().extra_repr()}{rows}"


def rows_of_blocks(first: int, last: int, columns: int, weight: Tensor, scale: Tensor, rows: int = FP8_BLOCK) -> Tensor:
    """Rows of a weight with a scale per block, in float32, and its leading columns; `first` is a multiple of the
    block size."""
    blocks = slice(first // rows, -(-last // rows))
    down = scale[blocks].repeat_interleave(rows, 0)[: last - first]
    return weight[first:last, :columns].to(torch.float32) * down.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
