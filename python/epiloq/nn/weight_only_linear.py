"""WeightOnlyLinear: a linear layer with a low-bit weight and floating-point activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq.nn.base.dense_rows import dense_rows
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.packed_linear import PackedLinear, check_grid, packed_nearest
from epiloq.nn.base.quantized_layer import convert_input
from epiloq.nn.base.scaled_input import SCALE, begin, scaled_input
from epiloq.weights.packed_weight import PackedWeight


class WeightOnlyLinear(PackedLinear):
    """``y = x W^T + bias`` with weights of 2, 3, 4 or 8 bits, see ``epiloq.weight_only_mm`` and
    ``epiloq.PackedWeight``.

    `x` is ``[…, in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` is
    contiguous ``[…, out_features]`` in the dtype of `x`.

    bits
        2, 3, 4 or 8.
    zeros
        "none" (symmetric), "zero" (integer zero points) or "offset" (real ones).
    act_order
        Whether input features are permuted.
    scaled_input
        Whether `x` is first multiplied by `pre_quant_scale`, in float32 and rounded to the dtype of `x`. Not with
        `act_order`.

    Parameters without gradients, which form the state dict: `weight_q`, `weight_scale` and, if present,
    `weight_zero`, `weight_offset` and `weight_perm`, as described for ``epiloq.PackedWeight``; `bias`
    ``[out_features]`` of the layer's float dtype, the only parameter that ``.to(dtype)`` converts. Loading keeps the
    dtype of scales and offsets. `packed` is these as a value, `weight` the dequantised weight, computed on access. With
    `scaled_input` also `pre_quant_scale` ``[in_features]``, ones at first, which `weight` includes.

    Raises ValueError for sizes below 1, other bits, group sizes or zeros, and for `scaled_input` with `act_order`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bits: int = 4,
        group_size: int = 128,
        zeros: str = "none",
        act_order: bool = False,
        scaled_input: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, bits, group_size, zeros, act_order, device, dtype)
        if scaled_input and act_order:
            raise ValueError("WeightOnlyLinear: scaled_input: expected False with act_order, got True")
        if scaled_input:
            begin(self, in_features, device)

    @classmethod
    def from_packed(cls, weight: PackedWeight, bias: Tensor | None = None) -> WeightOnlyLinear:
        """Create a layer that shares the tensors of a packed weight ``[out_features, in_features]``, and its bias."""
        return cls._of_packed(weight, bias)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, *, bits: int = 4, group_size: int = 128, zeros: str = "none"
    ) -> WeightOnlyLinear:
        """Round `linear` (which is not changed) to the nearest grid of each group, on its device.

        With zeros "none", ``scale = 2 amax / (2^bits - 1)``; with "zero" ``scale = (hi - lo) / (2^bits - 1)`` and
        ``zero = round(-lo / scale)``, where [lo, hi] is the range of the group and 0. Scales are rounded to the
        weight's dtype and at least its smallest normal number; ``q = clamp(round(W / scale) + zero)``, half to even.
        "meta" gives "meta".

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear`` that is called and has finite
        weights, and for other zeros.
        """
        cls.check_convertible(linear)
        check_grid("WeightOnlyLinear", bits, group_size, zeros)
        weight, symmetric = linear.weight, zeros == "none"
        if weight.is_meta:
            return cls._like(linear, bits=bits, group_size=group_size, zeros=zeros)
        return cls.from_packed(packed_nearest(weight, bits, group_size, symmetric), linear.bias).train(linear.training)

    @property
    def scaled_input(self) -> bool:
        """Whether inputs are multiplied by `pre_quant_scale`."""
        return self._stored(SCALE) is not None

    def forward(self, input: Tensor) -> Tensor:
        if is_symbolic(input):
            return as_leaf(self, input)
        if self._parameters.get(SCALE, self) is not None:  # also where it is an attribute instead
            input = scaled_input(self, input)
        if not is_dynamo_compiling() and (y := _core.weight_only_linear(self, input)) is not None:
            return y
        x = convert_input(self, input)
        self._check_width(x)
        return self._call(x, self._parts())

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        bias = None if tensors[1] is None else tensors[1].to(x.dtype)
        y = epiloq.weight_only_mm(dense_rows(x.reshape(-1, self.in_features)), self._value(*tensors), bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        own = f"bits={self.bits}, group_size={self.group_size}, zeros={self.zeros}"
        scaled = ", scaled_input=True" if self.scaled_input else ""
        return f"{super().extra_repr()}, {own}, act_order={self.weight_perm is not None}{scaled}"
