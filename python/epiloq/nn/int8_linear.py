"""Int8Linear: a linear layer with int8 weights and int8 activations."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.prepared_linear import (
    FLOAT32,
    K_MULTIPLE,
    N_MULTIPLE,
    PreparedLinear,
    check_choice,
    kernel_dtype,
    number,
    padded,
)
from epiloq.nn.base.quantized_layer import convert_input

ACTIVATIONS = ("dynamic", "static")


def max_in_features(symmetric: bool) -> int:
    """Largest padded K with exact int32 sums: both factors are at most 128, but |q - azp| is at most 255."""
    largest_product = 128 * (128 if symmetric else 255)
    return (2**31 - 1) // largest_product // K_MULTIPLE * K_MULTIPLE


def _check_in_features(in_features: int, symmetric: bool) -> None:
    if in_features > max_in_features(symmetric):
        kind = "symmetric" if symmetric else "asymmetric"
        raise ValueError(
            f"Int8Linear: in_features: expected at most {max_in_features(symmetric)} (the exact range of int32 sums "
            f"with {kind} activations), got {in_features}"
        )


class Int8Linear(PreparedLinear):
    """``y = x W^T + bias`` with int8 weights (one scale per output channel, symmetric) and x quantised to int8.

    `x` is ``[…, in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` is
    contiguous ``[…, out_features]`` in the dtype of `x`. The accumulation is exact in int32 and the epilogue is in
    float32. CUDA kernels write 16-bit outputs only: float32 `x` on CUDA is computed with a bfloat16 output, then
    widened.

    activation, symmetric
        ``"dynamic"``: a scale (and, unless `symmetric`, a zero point) per token, see ``epiloq.quantize_int8``.
        ``"static"``: one scale (and zero point) for all tokens, stored in `input_scale` (and `input_zero_point`).

    Parameters without gradients, which form the state dict (N = out_features, K = in_features):
        weight_q          int8 [N, K], scale * q with q = round-half-even(W / scale)
        weight_scale      float32 [N] = max(max_k |W[n, k]| / 127, 2^-126)
        bias              [N], of the layer's float dtype; the only parameter that ``.to(dtype)`` converts
        input_scale       float32 [1], static only
        input_zero_point  int32 [1] in [-128, 127], static and asymmetric only
    `weight` is the dequantised weight, computed on access. Kernels need N padded to a multiple of 8 and K to one of
    16: for other sizes they read padded copies, made before the first call, and an out_features that is not a
    multiple of 8 costs one copy of `y`. With a zero point they also read the sums of the weight's rows (times
    `input_zero_point` if static). Both are updated when parameters are loaded or written.

    Raises ValueError for an `in_features` whose int32 sums could overflow (the limit is 131056 if symmetric, else
    65792).
    """

    WEIGHT_DTYPE = torch.int8
    PARTS = ("weight_q", "bias", "weight_scale", "azp_adj", "input_scale", "input_zero_point")

    weight_scale: Tensor
    input_scale: Tensor | None
    input_zero_point: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "dynamic",
        symmetric: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        check_choice("Int8Linear", "activation", activation, ACTIVATIONS)
        _check_in_features(in_features, symmetric)
        self.activation, self.symmetric = activation, symmetric
        static, n, k = activation == "static", out_features, in_features
        self._hold("weight_q", (n, k), (N_MULTIPLE, K_MULTIPLE), self.WEIGHT_DTYPE, device)
        self._hold("weight_scale", (n,), (N_MULTIPLE,), torch.float32, device)
        self._hold("bias", (n,), (N_MULTIPLE,), dtype, device, wanted=bias)
        self._hold("input_scale", (1,), (1,), torch.float32, device, wanted=static)
        self._hold("input_zero_point", (1,), (1,), torch.int32, device, wanted=static and not symmetric)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        activation: str = "dynamic",
        symmetric: bool = True,
        input_scale: float | Tensor | None = None,
        input_zero_point: int | Tensor | None = None,
    ) -> Int8Linear:
        """Quantise `linear` (which is not changed) to the nearest int8 weights, on its device (including "meta").

        `input_scale` (finite, at least 2^-126) is for static activations, `input_zero_point` (-128 to 127) for static
        asymmetric ones: x is about ``input_scale * (q - input_zero_point)``.

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear`` with finite weights, and for
        input parameters that are missing, out of range or not applicable.
        """
        cls.check_convertible(linear, symmetric=symmetric)
        weight, static = linear.weight, activation == "static"
        layer = cls._like(linear, activation=activation, symmetric=symmetric)
        scale = number("Int8Linear: input_scale", input_scale, static, (int, float), FLOAT32.tiny, FLOAT32.max)
        asymmetric = static and not symmetric
        zero_point = number("Int8Linear: input_zero_point", input_zero_point, asymmetric, (int,), -128, 127)
        if weight.is_meta:
            return layer
        q, weight_scale, _ = epiloq.quantize_int8(weight.contiguous(), pad_to=K_MULTIPLE)
        if layer.input_scale is not None:
            layer.input_scale.fill_(scale)
        if layer.input_zero_point is not None:
            layer.input_zero_point.fill_(zero_point)
        layer._fill(weight_q=q, weight_scale=weight_scale.flatten(), bias=linear.bias)
        return layer

    @classmethod
    def check_convertible(cls, linear: nn.Module, *, symmetric: bool = True, **options: Any) -> None:
        super().check_convertible(linear)
        _check_in_features(cast(nn.Linear, linear).in_features, symmetric)

    def forward(self, input: Tensor) -> Tensor:
        if not is_dynamo_compiling() and (y := _core.int8_linear(self, input)) is not None:
            return y
        if is_symbolic(input):
            return as_leaf(self, input)
        return self._call(convert_input(self, input), self._made)

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        tokens = self._quantised(self._tokens(x), *tensors)
        return self._result(self._product(*tokens, kernel_dtype(x, x.dtype), *tensors), x)

    def _quantised(self, rows: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        *_, input_scale, input_zero_point = tensors
        q, scale, azp = epiloq.quantize_int8(
            rows, scale=input_scale, azp=input_zero_point, symmetric=self.symmetric, pad_to=K_MULTIPLE
        )
        # A static zero point is already a factor of azp_adj.
        return q, scale, azp if self.activation == "dynamic" else None

    def _product(self, q: Tensor, scale: Tensor, azp: Tensor | None, dtype: torch.dtype, *tensors: Any) -> Tensor:
        weight_q, bias, weight_scale, azp_adj, *_ = tensors
        bias = None if bias is None else bias.to(dtype)
        rest: Any = {"out_dtype": dtype, "constant_b": True}
        if azp_adj is None:
            return epiloq.scaled_mm(q, weight_q.t(), scale, weight_scale, bias, **rest)
        return epiloq.scaled_mm_azp(q, weight_q.t(), scale, weight_scale, azp_adj, azp, bias, **rest)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}, symmetric={self.symmetric}"

    def _padded(self, name: str) -> Tensor | None:
        if name != "azp_adj":
            return super()._padded(name)
        if self.symmetric:
            return None
        sums, zero_point = self.weight_q.sum(dim=1, dtype=torch.int32), super()._padded("input_zero_point")
        return padded(sums if zero_point is None else sums * zero_point, self._padded_shapes["weight_scale"])
