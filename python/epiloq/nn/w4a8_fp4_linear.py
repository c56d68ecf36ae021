"""W4A8Fp4Linear: a linear layer with FP4 weights, MXFP4 or NVFP4, and 8-bit activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn.base.prepared_linear import PreparedLinear, check_choice
from epiloq.nn.base.w4a8_layer import ACTIVATIONS, W4A8Layer
from epiloq.nn.fp4_linear import Fp4Linear


class W4A8Fp4Linear(Fp4Linear, W4A8Layer):
    """``y = x W^T + bias`` with E2M1 weights in blocks that share a scale and x quantised to 8 bits per token, see
    ``epiloq.w4a8_mm``.

    `x` is ``[…, in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` is contiguous
    ``[…, out_features]`` in the dtype of `x`. On CUDA, MXFP4 with FP8 activations and more than 256 tokens runs on FP8
    tensor cores from SM89 on. Fewer tokens, and NVFP4, are multiplied in bfloat16, to which quantised tokens are
    converted: this costs more than the product of an `Fp4Linear`, and is not more accurate. float32 `x` on CUDA is
    computed with a bfloat16 output, then widened.

    activation
        "fp8" (float8_e4m3fn, as by ``epiloq.quantize_fp8``) or "int8" (symmetric, as by ``epiloq.quantize_int8``),
        with dynamic scales per token.
    format, reciprocal
        As for `Fp4Linear`.

    The attribute `weight_only_below`, 0 by default, is as for `W4A8Linear`: a call with fewer tokens (rows of `x`)
    does not quantise them and runs as an `Fp4Linear`.

    Parameters without gradients, which form the state dict: those of `Fp4Linear`, without `pre_quant_scale`.

    Raises ValueError for sizes below 1, other formats or activations, and negative scales.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "mxfp4",
        activation: str = "fp8",
        reciprocal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice(self._class(), "activation", activation, tuple(ACTIVATIONS))
        options: dict[str, Any] = {"format": format, "reciprocal": reciprocal, "device": device, "dtype": dtype}
        super().__init__(in_features, out_features, bias, **options)
        self.activation = activation

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, *, format: str = "mxfp4", activation: str = "fp8", divisor: Tensor | None = None
    ) -> W4A8Fp4Linear:
        """Round `linear` (which is not changed) to the nearest numbers, as `Fp4Linear.from_linear` does.

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear`` that is called, and for other
        formats or activations.
        """
        check_choice(cls.__name__, "activation", activation, tuple(ACTIVATIONS))
        layer = cls._rounded(linear, format, divisor)
        layer.activation = activation
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return PreparedLinear.forward(self, x)

    _run = W4A8Layer._run

    def _weight_only(self, rows: Tensor, bias: Tensor | None, *tensors: Any) -> Tensor:
        return epiloq.packed_fp4_mm(rows, self._value(*tensors), bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
