"""WeightOnlyLinear: a linear layer with a weight of few bits and floating-point activations."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

import epiloq
from epiloq._library import PLAIN
from epiloq.nn.dense_rows import dense_rows
from epiloq.nn.direct_call import takes_directly
from epiloq.nn.frozen import FrozenLinear
from epiloq.nn.prepared_linear import FLOAT_DTYPES, check_linear
from epiloq.nn.quantized_layer import convert_input, expected
from epiloq.ops.weight_only_mm import run
from epiloq.weights.packed_weight import PackedWeight, check_sizes, checked_perm, pack_weight
from epiloq.weights.scales import scales_in, wide_enough

_PARTS = ("q", "scale", "zero", "offset", "perm")
_STORED = ("weight_q", "bias", "weight_scale", "weight_zero", "weight_offset", "weight_perm")


class WeightOnlyLinear(FrozenLinear):
    """``y = x W^T + bias`` with W of 2, 3, 4 or 8 bits, see ``epiloq.weight_only_mm`` and ``epiloq.PackedWeight``.

    For inference. `x` is ``[.., in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` is
    contiguous ``[.., out_features]`` in the dtype of `x`.

    zeros
        "none" (symmetric), "zero" (integer zero points) or "offset" (real ones).
    act_order
        Whether input features are permuted.

    Parameters without gradients, which are the state dict: `weight_q`, `weight_scale`, and where there are such
    `weight_zero`, `weight_offset` and `weight_perm`, as ``epiloq.PackedWeight`` describes them; `bias`
    ``[out_features]`` of the layer's float dtype, the only one that ``.to(dtype)`` converts. Loading takes scales and
    offsets in the dtype that they come in. `packed` is these as a value, `weight` the float weight, computed when it is
    read.

    Raises ValueError for sizes below 1, other bits, group sizes or zeros.
    """

    weight_q: Tensor
    weight_scale: Tensor
    weight_zero: Tensor | None
    weight_offset: Tensor | None
    weight_perm: Tensor | None
    bias: Tensor | None

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"WeightOnlyLinear: {name}: expected at least 1, got {size}")
        options: dict[str, Any] = {"zeros": zeros, "act_order": act_order, "dtype": self._dtype, "device": device}
        packed = PackedWeight.empty(out_features, in_features, bits, group_size, **options)
        self._take(packed, torch.zeros(out_features, device=device, dtype=dtype) if bias else None)

    def _take(self, packed: PackedWeight, bias: Tensor | None) -> None:
        self.in_features, self.out_features = packed.k, packed.n
        self.bits, self.group_size = packed.bits, packed.group_size
        for name in _PARTS:
            self._store(f"weight_{name}", getattr(packed, name))
        self._store("bias", bias)

    @classmethod
    def from_packed(cls, weight: PackedWeight, bias: Tensor | None = None) -> WeightOnlyLinear:
        """The layer of a packed weight ``[out_features, in_features]``, whose tensors it shares, and its bias."""
        if bias is not None and (bias.shape != (weight.n,) or bias.device != weight.device):
            raise ValueError(
                f"WeightOnlyLinear: bias: expected [{weight.n}] on {weight.device}, "
                f"got {list(bias.shape)} on {bias.device}"
            )
        layer = cls.__new__(cls)
        FrozenLinear.__init__(layer, weight.scale.dtype)
        layer._take(weight, None if bias is None else bias.detach().clone())
        return layer

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, *, bits: int = 4, group_size: int = 128, zeros: str = "none"
    ) -> WeightOnlyLinear:
        """Round `linear` (left as it is) to the nearest grid of each group, on its device.

        With zeros "none", ``scale = 2 amax / (2^bits - 1)``; with "zero" ``scale = (hi - lo) / (2^bits - 1)`` and
        ``zero = round(-lo / scale)``, where [lo, hi] is the range of the group and 0. Scales are rounded to the
        weight's dtype and at least its smallest normal number; ``q = clamp(round(W / scale) + zero)``, half to even. A
        group with a NaN or an infinity, or whose range is one in the weight's dtype, gives NaN. "meta" gives "meta".

        Raises ValueError for what is not a float32, float16 or bfloat16 ``nn.Linear`` that is called, and other zeros.
        """
        cls.check_convertible(linear)
        check_zeros("WeightOnlyLinear", zeros)
        weight, symmetric = linear.weight, zeros == "none"
        if weight.is_meta:
            sizes = (linear.in_features, linear.out_features, linear.bias is not None)
            layer = cls(*sizes, bits=bits, group_size=group_size, zeros=zeros, device="meta", dtype=weight.dtype)
        else:
            packed = pack_weight(*nearest(weight, bits, group_size, symmetric), bits=bits, group_size=group_size)
            layer = cls.from_packed(packed, linear.bias)
        return layer.train(linear.training)

    @staticmethod
    def check_convertible(linear: nn.Module, **options: Any) -> None:
        """Raise ValueError unless ``from_linear`` can take `linear` as it is."""
        check_linear("WeightOnlyLinear", linear)

    @property
    def zeros(self) -> str:
        """ "none", "zero" or "offset", as the constructor has it."""
        return kind_of_zeros(self)

    @property
    def packed(self) -> PackedWeight:
        """The weight as a value, which shares the parameters."""
        return self._value(*self._parts())

    def forward(self, x: Tensor) -> Tensor:
        x, parts = convert_input(self, x), self._all_stored(_STORED)
        if takes_directly(x, self.in_features, parts):
            q, bias, scale, zero, offset, perm = parts
            numbers = (self.bits, self.out_features, self.in_features, self.group_size)
            return run(x, q, scale, zero, offset, perm, bias, *numbers, -inf, inf)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"WeightOnlyLinear: x: expected shape [.., {self.in_features}], got {list(x.shape)}")
        return self._call(x, parts)

    def _parts(self) -> Sequence[Any]:
        return self._all_stored(_STORED)

    def _value(self, *tensors: Any) -> PackedWeight:
        q, _, scale, zero, offset, perm = tensors
        numbers = (self.bits, self.out_features, self.in_features, self.group_size)
        return PackedWeight(q, scale, zero, offset, perm, *numbers)

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        bias = None if tensors[1] is None else tensors[1].to(x.dtype)
        y = epiloq.weight_only_mm(dense_rows(x.reshape(-1, self.in_features)), self._value(*tensors), bias)
        return y.view(*x.shape[:-1], self.out_features)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        return self._value(*tensors).row_slice(first, last).dequantize()

    @property
    def weight_bytes(self) -> int:
        """Bytes that stand for the float weight in memory: integers with padding, scales, zero points, the order."""
        return self.packed.nbytes

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``[out_features, in_features]``."""
        return self.out_features, self.in_features

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group_size={self.group_size}, zeros={self.zeros}, "
            f"act_order={self.weight_perm is not None}"
        )

    def _fitting(self, name: str, given: Tensor, held: Tensor) -> Tensor | str:
        known = given.is_floating_point() if name == "bias" else given.dtype in FLOAT_DTYPES
        both_float = known and held.is_floating_point()
        if given.shape != held.shape or not (both_float or given.dtype == held.dtype):
            return expected(held, given)
        if name == "weight_perm" and type(given) in PLAIN and not given.is_meta:
            try:
                checked_perm(given, self.in_features, given.device, "WeightOnlyLinear")
            except ValueError as error:
                return str(error).rpartition(": ")[2]
        if name != "bias" and given.dtype != held.dtype:
            self._store(name, torch.empty_like(held, dtype=given.dtype))
        return given


def kind_of_zeros(layer: nn.Module) -> str:
    """What a layer's weight has beside scales."""
    return "zero" if layer.weight_zero is not None else "offset" if layer.weight_offset is not None else "none"


def check_zeros(where: str, zeros: str) -> None:
    """Raise ValueError for what `nearest` does not round to."""
    if zeros not in ("none", "zero"):
        raise ValueError(f"{where}: zeros: expected none or zero, got {zeros!r}")


def nearest(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of the grids nearest to a weight, q ``[N, K]`` and scale ``[N, groups]``, and zero points unless symmetric.

    Bit for bit ``epiloq.quantize.Grid``'s, which stands on these layers and cannot be asked here.
    """
    check_sizes(bits, group_size, "WeightOnlyLinear")
    n, k = weight.shape
    length = k if group_size == -1 else group_size
    groups = -(-k // length)
    padded = nn.functional.pad(weight.float(), (0, groups * length - k)).view(n, groups, length)
    # Padding is zeros, as ranges have zero. Of a symmetric grid one point more lies below zero than above: half a step
    # on either side splits the difference.
    low, high = padded.amin(-1), padded.amax(-1)
    span = 2 * torch.maximum(-low, high) if symmetric else high.clamp(min=0) - low.clamp(max=0)
    # By a tensor: torch's CUDA kernels multiply by the reciprocal of a number that they are to divide by.
    dtype = weight.dtype
    if not weight.is_meta:
        largest = float(weight.abs().max()) * (2 if symmetric else 1) / ((1 << bits) - 1)
        dtype = wide_enough(largest, dtype)
    scale = scales_in(span / span.new_tensor((1 << bits) - 1), dtype)
    step, lowest, most = scale.float(), -(1 << (bits - 1)) if symmetric else 0, (1 << bits) - 1
    zero = None if symmetric else torch.round(-low.clamp(max=0) / step).nan_to_num_(0).clamp_(0, most)
    q = torch.round(padded / step.unsqueeze(-1)).nan_to_num_(0)
    if zero is not None:
        q += zero.unsqueeze(-1)
    q = q.clamp_(lowest, lowest + most).view(n, -1)[:, :k].to(torch.int8 if symmetric else torch.uint8)
    return q, scale, None if zero is None else zero.to(torch.uint8)
