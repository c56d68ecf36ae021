"""W4A8Linear: a linear layer with 4-bit weights and 8-bit activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.packed_linear import PackedLinear, check_grid, packed_nearest
from epiloq.nn.base.prepared_linear import check_choice
from epiloq.nn.base.quantized_layer import convert_input
from epiloq.nn.base.w4a8_layer import ACTIVATIONS, W4A8Layer
from epiloq.weights.packed_weight import PackedWeight


class W4A8Linear(PackedLinear, W4A8Layer):
    """``y = x W^T + bias`` with 4-bit weights and x quantised to 8 bits per token, see ``epiloq.w4a8_mm``.

    `x` is ``[…, in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` is
    contiguous ``[…, out_features]`` in the dtype of `x`. CUDA kernels write 16-bit outputs only: float32 `x` on CUDA
    is computed with a bfloat16 output, then widened.

    activation
        "fp8" (float8_e4m3fn, as by ``epiloq.quantize_fp8``) or "int8" (symmetric, as by ``epiloq.quantize_int8``),
        with dynamic scales per token.
    zeros
        "none" (symmetric) or "zero" (integer zero points).
    act_order
        Whether input features are permuted.

    The attribute `weight_only_below`, 0 by default, may be set at any time and is not part of the state dict: a call
    with fewer tokens (rows of `x`) does not quantise them and runs as a `WeightOnlyLinear`. This is closer to the
    float layer and, for fewer than about 64 tokens on a GPU, faster, because such a product is limited by reading the
    weight. But a token's result then depends on the number of tokens, so it cannot be combined with
    ``epiloq.set_batch_invariant``, and it deviates from the scheme. ``epiloq.optimize_`` sets it for a model.

    Parameters without gradients, which form the state dict: those of `WeightOnlyLinear`.

    Raises ValueError for sizes below 1, other activations, group sizes or zeros.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "fp8",
        group_size: int = 128,
        zeros: str = "none",
        act_order: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("W4A8Linear", "activation", activation, tuple(ACTIVATIONS))
        check_grid("W4A8Linear", 4, group_size, zeros)
        super().__init__(in_features, out_features, bias, 4, group_size, zeros, act_order, device, dtype)
        self.activation = activation

    @classmethod
    def from_packed(cls, weight: PackedWeight, bias: Tensor | None = None, *, activation: str = "fp8") -> W4A8Linear:
        """Create a layer that shares the tensors of a packed weight ``[out_features, in_features]``, and its bias.

        Raises ValueError for a weight with other bit widths or real offsets, an invalid bias, and other activations.
        """
        check_choice("W4A8Linear", "activation", activation, tuple(ACTIVATIONS))
        if weight.bits != 4 or weight.offset is not None:
            raise ValueError(f"W4A8Linear: weight: expected 4 bits without real offsets, got {weight}")
        layer = cls._of_packed(weight, bias)
        layer.activation = activation
        return layer

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, *, activation: str = "fp8", group_size: int = 128, zeros: str = "none"
    ) -> W4A8Linear:
        """Round `linear` (which is not changed) to each group's nearest grid, as `WeightOnlyLinear.from_linear` does.

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear`` that is called, and for other
        activations, group sizes or zeros.
        """
        cls.check_convertible(linear)
        options: dict[str, Any] = {"activation": activation, "group_size": group_size, "zeros": zeros}
        weight, sizes = linear.weight, (linear.in_features, linear.out_features, linear.bias is not None)
        layer = cls(*sizes, **options, device="meta", dtype=weight.dtype)
        if not weight.is_meta:
            packed = packed_nearest(weight, layer.bits, group_size, zeros == "none")
            layer = cls.from_packed(packed, linear.bias, activation=activation)
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        if not is_dynamo_compiling() and (y := _core.w4a8_linear(self, input)) is not None:
            return y
        if is_symbolic(input):
            return as_leaf(self, input)
        x = convert_input(self, input)
        self._check_width(x)
        return self._call(x, self._parts())

    def _weight_only(self, rows: Tensor, bias: Tensor | None, *tensors: Any) -> Tensor:
        return epiloq.weight_only_mm(rows, self._value(*tensors), bias)

    def extra_repr(self) -> str:
        own = f"activation={self.activation}, group_size={self.group_size}, zeros={self.zeros}"
        return f"{super().extra_repr()}, {own}, act_order={self.weight_perm is not None}"
