"""Fp8BlockExperts: linear layers of a mixture of experts, with FP8 weights in blocks and activations in groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq.nn.base.fp8_tokens import fp8_tokens
from epiloq.nn.base.prepared_linear import FP8_BLOCK, K_MULTIPLE, as_stored
from epiloq.nn.experts.row_experts import ExpertRows, Experts
from epiloq.nn.fp8_block_linear import rows_of_blocks


class Fp8BlockExperts(Experts):
    __doc__ = f"""{Experts.__doc__}
    Weights are float8_e4m3fn with a scale per block of 128 x 128, activations float8_e4m3fn with a dynamic scale per
    128 values of a token, as in `Fp8BlockLinear`.

    Parameters without gradients, which form the state dict (E = experts, N = out_features, K = in_features):
        weight_q          uint8 [E, N, K], the bytes of float8_e4m3fn values, W / scale rounded to nearest
        weight_scale_inv  float32 [E, ceil(N / 128), ceil(K / 128)], max|W| / 448 of the block, at least 2^-126
    Kernels need N padded to a multiple of 8 and K to one of 16; for other sizes they read padded copies.
    """

    WEIGHT_DTYPE = torch.float8_e4m3fn
    SCALE, ROWS_PER_SCALE = "weight_scale_inv", FP8_BLOCK
    PARTS = ("weight_q", "weight_scale_inv")

    weight_scale_inv: Tensor

    def _hold_scales(self, device: torch.device | str | None) -> None:
        blocks = (-(-self.out_features // FP8_BLOCK), -(-self.in_features // FP8_BLOCK))
        self._hold("weight_scale_inv", (self.experts, *blocks), (1, 1, 1), torch.float32, device)

    def _fill_expert(self, expert: int, values: Tensor) -> None:
        q, scale = epiloq.quantize_fp8(values, granularity="block", pad_to=K_MULTIPLE)
        self.weight_q[expert] = as_stored(q[:, : self.in_features], self.weight_q.dtype)
        self.weight_scale_inv[expert] = scale

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        return rows_of_blocks(first, last, self.in_features, *tensors)

    @property
    def quantize_options(self) -> Mapping[str, Any]:
        return {"dtype": self.WEIGHT_DTYPE, "granularity": "group", "scale_layout": "column"}

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return fp8_tokens(x, "group", scale_layout="column")

    def multiply(self, q: Tensor, scale: Tensor | None, out_dtype: torch.dtype, rows: ExpertRows) -> Tensor:
        weight_q, weight_scale_inv = (part.mT for part in self._made)
        assert scale is not None
        return epiloq.grouped_mm(
            q, weight_q, scale, weight_scale_inv, offs=rows.offs, masked_m=rows.masked_m, out_dtype=out_dtype
        )
