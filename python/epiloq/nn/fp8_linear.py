"""Fp8Linear: a linear layer with FP8 weights and activations, scales per row or tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq._torch.calls import refuse_batch_invariant
from epiloq._torch.devices import multiplies_float8
from epiloq.nn.base.fp8_tokens import fp8_tokens
from epiloq.nn.base.fp8_weight import fp8_weight_product
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.prepared_linear import (
    FLOAT32,
    K_MULTIPLE,
    N_MULTIPLE,
    PreparedLinear,
    check_choice,
    kernel_dtype,
    number,
)
from epiloq.nn.base.quantized_layer import convert_input

ACTIVATIONS = ("token", "tensor", "static")
WEIGHTS = ("channel", "tensor")


class Fp8Linear(PreparedLinear):
    """``y = x W^T + bias`` with float8_e4m3fn weights and x quantised to float8_e4m3fn.

    `x` is ``[…, in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` is
    contiguous ``[…, out_features]`` in the dtype of `x`. Sums and epilogue are in float32. CUDA kernels write 16-bit
    outputs only: float32 `x` on CUDA is computed with a bfloat16 output, then widened.

    activation
        ``"token"``: a dynamic scale per token, see ``epiloq.quantize_fp8``. ``"tensor"``: one dynamic scale for all
        of `x`, so that the rounding of a token depends on the others in the batch. ``"static"``: one scale for all,
        in `input_scale`; values beyond 448 times the scale saturate.
    weight
        ``"channel"``: a scale per output feature. ``"tensor"``: one for all of W.
    limit
        Values are clamped to this magnitude before scales are computed; None for no limit.

    On GPUs without FP8 tensor cores (below compute capability 8.9) x is not quantised: `epiloq.fp8_weight_mm`.

    Parameters without gradients, which form the state dict (N = out_features, K = in_features):
        weight_q      uint8 [N, K], the bytes of float8_e4m3fn values, W / scale rounded to nearest, ties to even
        weight_scale  float32 [N], or [1] for "tensor": max|W| / 448, at least 2^-126
        bias          [N], of the layer's float dtype; the only parameter that ``.to(dtype)`` converts
        input_scale   float32 [1], static only
    `weight` is the dequantised weight, computed on access. Kernels need N padded to a multiple of 8 and K to one of
    16: for other sizes they read padded copies, and an out_features that is not a multiple of 8 costs one copy of
    `y`.
    """

    WEIGHT_DTYPE = torch.float8_e4m3fn
    PARTS = ("weight_q", "bias", "weight_scale", "input_scale")

    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "token",
        weight: str = "channel",
        limit: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        check_choice("Fp8Linear", "activation", activation, ACTIVATIONS)
        check_choice("Fp8Linear", "weight", weight, WEIGHTS)
        if limit is not None and not limit > 0:
            raise ValueError(f"Fp8Linear: limit: expected a number above 0 or None, got {limit!r}")
        self.activation, self.weight_scales, self.limit = activation, weight, limit
        n, scales, multiple = (out_features, out_features, N_MULTIPLE) if weight == "channel" else (out_features, 1, 1)
        self._hold("weight_q", (n, in_features), (N_MULTIPLE, K_MULTIPLE), self.WEIGHT_DTYPE, device)
        self._hold("weight_scale", (scales,), (multiple,), torch.float32, device)
        self._hold("bias", (n,), (N_MULTIPLE,), dtype, device, wanted=bias)
        self._hold("input_scale", (1,), (1,), torch.float32, device, wanted=activation == "static")

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        activation: str = "token",
        weight: str = "channel",
        input_scale: float | Tensor | None = None,
    ) -> Fp8Linear:
        """Quantise `linear` (which is not changed) to the nearest FP8 weights, on its device (including "meta").

        `input_scale` (finite, at least 2^-126) is for static activations: x is about ``input_scale * q``.

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear`` with finite weights, and for
        an `input_scale` that is missing, out of range or not applicable.
        """
        cls.check_convertible(linear)
        values, static = linear.weight, activation == "static"
        layer = cls._like(linear, activation=activation, weight=weight)
        scale = number("Fp8Linear: input_scale", input_scale, static, (int, float), FLOAT32.tiny, FLOAT32.max)
        if values.is_meta:
            return layer
        granularity = "token" if weight == "channel" else "tensor"
        q, weight_scale = epiloq.quantize_fp8(values.contiguous(), granularity=granularity, pad_to=K_MULTIPLE)
        if layer.input_scale is not None:
            layer.input_scale.fill_(scale)
        layer._fill(weight_q=q, weight_scale=weight_scale.flatten(), bias=linear.bias)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        if is_symbolic(input):
            return as_leaf(self, input)
        limited = input if self.limit is None else self._limited(convert_input(self, input))
        if not is_dynamo_compiling() and (y := _core.fp8_linear(self, limited)) is not None:
            return y
        x = convert_input(self, input)
        if self.activation == "tensor" and multiplies_float8(x.device):
            refuse_batch_invariant("epiloq.nn.Fp8Linear", "a scale per tensor depends on all tokens")
        return self._call(x, self._made)

    def _limited(self, x: Tensor) -> Tensor:
        # Not for integers: clamp would convert them to floating point, and the quantiser would no longer refuse them.
        return x if self.limit is None or not x.is_floating_point() else x.clamp(-self.limit, self.limit)

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        x = self._limited(x)
        if not multiplies_float8(x.device):
            weight_q, bias, weight_scale, _ = tensors
            self._check_width(x)
            block = (1, -1) if self.weight_scales == "channel" else (-1, -1)
            padding = self.padded_in_features - self.in_features
            return fp8_weight_product(x, weight_q, weight_scale, bias, block, padding, self.out_features)
        tokens = self._quantised(self._tokens(x), *tensors)
        return self._result(self._product(*tokens, kernel_dtype(x, x.dtype), *tensors), x)

    def _quantised(self, rows: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        return fp8_tokens(rows, "token" if self.activation == "token" else "tensor", scale=tensors[-1])

    def _product(self, q: Tensor, scale: Tensor, dtype: torch.dtype, *tensors: Any) -> Tensor:
        weight_q, bias, weight_scale, _ = tensors
        bias = None if bias is None else bias.to(dtype)
        return epiloq.scaled_mm(q, weight_q.t(), scale, weight_scale, bias, out_dtype=dtype, constant_b=True)

    def extra_repr(self) -> str:
        limit = "" if self.limit is None else f", limit={self.limit:g}"
        return f"{super().extra_repr()}, activation={self.activation}, weight={self.weight_scales}{limit}"
