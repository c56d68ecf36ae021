"""W4A8Fp4Linear: a linear layer with FP4 weights, MXFP4 or NVFP4, and 8-bit activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq.nn.base.prepared_linear import FLOAT32, PreparedLinear, check_choice, number
from epiloq.nn.base.w4a8_layer import ACTIVATIONS, GROUPS, STATIC, W4A8Layer, quantised_tokens
from epiloq.nn.fp4_linear import Fp4Linear

_CHOICES = (*ACTIVATIONS, GROUPS, STATIC)


class W4A8Fp4Linear(Fp4Linear, W4A8Layer):
    """``y = x W^T + bias`` with E2M1 weights in blocks that share a scale and x quantised to 8 bits, see
    ``epiloq.w4a8_mm``.

    `x` is ``[…, in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` is contiguous
    ``[…, out_features]`` in the dtype of `x`. On CUDA, MXFP4 with FP8 activations per token or tensor and more than 256
    tokens runs on FP8 tensor cores from SM89 on. Fewer tokens, NVFP4, and activations in groups are multiplied in
    bfloat16, to which quantised tokens are converted: this costs more than the product of an `Fp4Linear`, and is not
    more accurate. float32 `x` on CUDA is computed with a bfloat16 output, then widened.

    activation
        "fp8" (float8_e4m3fn, as by ``epiloq.quantize_fp8``) or "int8" (symmetric, as by ``epiloq.quantize_int8``),
        with dynamic scales per token; "fp8-group", FP8 with dynamic scales per token and group of 128 input features;
        "fp8-static", FP8 with one scale for all, `input_scale`, beyond 448 times which values saturate.
    format, reciprocal
        As for `Fp4Linear`.

    The attribute `weight_only_below`, 0 by default, is as for `W4A8Linear`: a call with fewer tokens (rows of `x`)
    does not quantise them and runs as an `Fp4Linear`.

    Parameters without gradients, which form the state dict: those of `Fp4Linear`, without `pre_quant_scale`, and
    input_scale  float32 [1], for "fp8-static"

    Raises ValueError for sizes below 1, other formats or activations, and negative scales.
    """

    PARTS = (*Fp4Linear.PARTS, "input_scale")

    input_scale: Tensor | None

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
        check_choice(self._class(), "activation", activation, _CHOICES)
        options: dict[str, Any] = {"format": format, "reciprocal": reciprocal, "device": device, "dtype": dtype}
        super().__init__(in_features, out_features, bias, **options)
        self.activation = activation
        self._hold("input_scale", (1,), (1,), torch.float32, device, wanted=activation == STATIC)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        format: str = "mxfp4",
        activation: str = "fp8",
        input_scale: float | Tensor | None = None,
        divisor: Tensor | None = None,
    ) -> W4A8Fp4Linear:
        """Round `linear` (which is not changed) to the nearest numbers, as `Fp4Linear.from_linear` does.

        `input_scale` (finite, at least 2^-126) is for "fp8-static": x is about ``input_scale * q``.

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear`` that is called, for other
        formats or activations, and for an `input_scale` that is missing, out of range or not applicable.
        """
        check_choice(cls.__name__, "activation", activation, _CHOICES)
        range_of_scale = (int, float), FLOAT32.tiny, FLOAT32.max
        scale = number(f"{cls.__name__}: input_scale", input_scale, activation == STATIC, *range_of_scale)
        layer = cls._rounded(linear, format, divisor, activation=activation)
        if layer.input_scale is not None and not layer.input_scale.is_meta:
            layer._fill(input_scale=layer.input_scale.new_tensor([scale]))
        return layer

    def forward(self, input: Tensor) -> Tensor:
        if not is_dynamo_compiling() and (y := _core.w4a8_fp4_linear(self, input)) is not None:
            return y
        return PreparedLinear.forward(self, input)

    _run = W4A8Layer._run

    def _make(self) -> Any:
        return *super()._make(), self._padded("input_scale")

    def _quantised(self, rows: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        return quantised_tokens(rows, self.activation, tensors[-1])

    def _weight_only(self, rows: Tensor, bias: Tensor | None, *tensors: Any) -> Tensor:
        return epiloq.packed_fp4_mm(rows, self._value(*tensors), bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
