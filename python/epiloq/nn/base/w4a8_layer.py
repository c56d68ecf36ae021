"""W4A8Layer: base class of linear layers with 4-bit weights and 8-bit activations."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq._torch.calls import refuse_batch_invariant
from epiloq.nn.base.dense_rows import dense_rows
from epiloq.nn.base.fp8_tokens import fp8_tokens
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.prepared_linear import K_MULTIPLE, kernel_dtype

ACTIVATIONS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Dtypes of quantised tokens by the name of the kind of activations, with a scale per token."""
GROUPS, STATIC = "fp8-group", "fp8-static"
"""Further kinds of activations: FP8 with a scale per token and group of 128, and with one scale of the layer."""


def quantised_tokens(x: Tensor, activation: str, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows ``[…, M, K]`` quantised to a kind of activations, padded along K, and their scales; `static` is the layer's
    scale for `STATIC`."""
    if activation == "int8":
        q, scale, _ = epiloq.quantize_int8(x, pad_to=K_MULTIPLE)
        return q, scale
    granularity = {GROUPS: "group", STATIC: "tensor"}.get(activation, "token")
    return fp8_tokens(x, granularity, scale=static)


class W4A8Layer(FrozenLinear):
    """A linear layer that quantises its tokens for ``epiloq.w4a8_mm``; its second tensor for kernels is the bias."""

    weight_only_below: int = 0
    activation: str

    def quantises(self, x: Tensor) -> bool:
        """Whether a call with `x` ``[…, in_features]`` quantises its tokens, rather than there being fewer than
        `weight_only_below`. Raises NotImplementedError with batch invariance if this depends on M."""
        if self.weight_only_below <= 0:
            return True
        name = f"epiloq.nn.{type(self).__name__}"
        refuse_batch_invariant(name, "weight_only_below makes a token's result depend on M")
        return x.numel() >= self.weight_only_below * self.in_features

    @abstractmethod
    def _value(self, *tensors: Any) -> Any:
        """The weight for `epiloq.w4a8_mm`."""

    @abstractmethod
    def _weight_only(self, rows: Tensor, bias: Tensor | None, *tensors: Any) -> Tensor:
        """The product of floating-point rows, which are not quantised."""

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        rows = dense_rows(x.reshape(-1, self.in_features))
        if self.quantises(x):
            y = self._product(*self._quantised(rows, *tensors), x.dtype, *tensors)
        else:
            y = self._weight_only(rows, None if tensors[1] is None else tensors[1].to(x.dtype), *tensors)
        return y.view(*x.shape[:-1], self.out_features)

    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[M, in_features]`` quantised for `multiply`, and their scales."""
        return self._quantised(rows, *self._parts())

    def _quantised(self, rows: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        return quantised_tokens(rows, self.activation)

    def multiply(self, q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Product of quantised tokens ``[M, in_features]`` (possibly padded) and the weight: ``[M, out_features]`` of
        `dtype`."""
        return self._product(q, scale, dtype, *self._parts())

    def _product(self, q: Tensor, scale: Tensor, dtype: torch.dtype, *tensors: Any) -> Tensor:
        out_dtype = kernel_dtype(q, dtype)
        bias = None if tensors[1] is None else tensors[1].to(out_dtype)
        weight = self._value(*tensors)
        return epiloq.w4a8_mm(q[:, : self.in_features], weight, scale, bias, out_dtype=out_dtype).to(dtype)
