"""PackedLinear: base class of linear layers with a low-bit `PackedWeight`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from epiloq._torch.library import PLAIN
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.quantized_layer import check_positive
from epiloq.nn.base.scaled_input import SCALE
from epiloq.nn.base.stored_tensors import expected
from epiloq.ops.checks.problems import explain_problem
from epiloq.weights.computed import FLOAT_DTYPES, check_bias
from epiloq.weights.packed.checks import check_sizes, checked_perm
from epiloq.weights.packed_weight import PackedWeight, pack_weight
from epiloq.weights.scales import scales_in, wide_enough

_PARTS = ("q", "scale", "zero", "offset", "perm")
# Stored tensors, in the order in which layers pass them.
STORED = ("weight_q", "bias", "weight_scale", "weight_zero", "weight_offset", "weight_perm")

_Layer = TypeVar("_Layer", bound="PackedLinear")


class PackedLinear(FrozenLinear):
    """``y = x W^T + bias`` with weights of 2, 3, 4 or 8 bits; subclasses define the product.

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
        bias: bool,
        bits: int,
        group_size: int,
        zeros: str,
        act_order: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(dtype)
        check_positive(type(self).__name__, in_features=in_features, out_features=out_features)
        options: dict[str, Any] = {"zeros": zeros, "act_order": act_order, "dtype": self._dtype, "device": device}
        packed = PackedWeight.empty(out_features, in_features, bits, group_size, **options)
        self._take(packed, torch.zeros(out_features, device=device, dtype=dtype) if bias else None)

    def _take(self, packed: PackedWeight, bias: Tensor | None) -> None:
        self.in_features, self.out_features = packed.k, packed.n
        self.bits, self.group_size = packed.bits, packed.group_size
        for name in _PARTS:
            self._store(f"weight_{name}", getattr(packed, name))
        self._store("bias", bias)
        self._store(SCALE, None)

    @classmethod
    def _of_packed(cls: type[_Layer], weight: PackedWeight, bias: Tensor | None) -> _Layer:
        """Create a layer from a packed weight, without the additional state of a subclass."""
        check_bias(f"{cls.__name__}: bias", bias, weight.n, weight.device)
        layer = cls.__new__(cls)
        FrozenLinear.__init__(layer, weight.scale.dtype)
        layer._take(weight, None if bias is None else bias.detach().clone())
        return layer

    @property
    def zeros(self) -> str:
        """ "none", "zero" or "offset", as in the constructor."""
        return kind_of_zeros(self)

    @property
    def packed(self) -> PackedWeight:
        """The weight as a value that shares the parameters' memory."""
        return self._value(*self._parts())

    def _parts(self) -> Sequence[Any]:
        return self._all_stored(STORED)

    def _value(self, *tensors: Any) -> PackedWeight:
        q, _, scale, zero, offset, perm = tensors
        numbers = (self.bits, self.out_features, self.in_features, self.group_size)
        return PackedWeight(q, scale, zero, offset, perm, *numbers)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        return self._value(*tensors).row_slice(first, last).dequantize()

    @property
    def weight_bytes(self) -> int:
        """Size of the quantised weight in bytes: integers with padding, scales, zero points and permutation."""
        return self.packed.nbytes

    def _fitting(self, name: str, given: Tensor, held: Tensor) -> Tensor | str:
        known = given.is_floating_point() if name == "bias" else given.dtype in FLOAT_DTYPES
        both_float = known and held.is_floating_point()
        if given.shape != held.shape or not (both_float or given.dtype == held.dtype):
            return expected(held, given)
        if name == "weight_perm" and type(given) in PLAIN and not given.is_meta:
            try:
                checked_perm(given, self.in_features, given.device, type(self).__name__)
            except ValueError as error:
                return str(error).rpartition(": ")[2]
        if name != "bias" and given.dtype != held.dtype:
            self._store(name, torch.empty_like(held, dtype=given.dtype))
        return given


@cache
def _has_kernel(bits: int, in_features: int, group_size: int) -> bool:
    sizes = {"m": 1, "n": 1, "k": in_features}
    return "dense" not in explain_problem("weight_only_mm", {**sizes, "bits": bits, "group_size": group_size})


def few_bits_note(bits: int, in_features: int, group_size: int) -> str | None:
    """How a 2- or 3-bit weight runs on a GPU, for `inspect`; None if kernels support it, and for other bits."""
    if bits >= 4 or _has_kernel(bits, in_features, group_size):
        return None
    return f"on CUDA each call dequantises the weight: no kernel supports groups of {group_size}"


def kind_of_zeros(layer: nn.Module) -> str:
    """Kind of zero points of a layer's weight: "none", "zero" or "offset"."""
    return "zero" if layer.weight_zero is not None else "offset" if layer.weight_offset is not None else "none"


def check_grid(where: str, bits: int, group_size: int, zeros: str) -> None:
    """Raise ValueError for a grid that `nearest` does not support."""
    check_sizes(bits, group_size, where)
    if zeros not in ("none", "zero"):
        raise ValueError(f"{where}: zeros: expected none or zero, got {zeros!r}")


def packed_nearest(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> PackedWeight:
    """The weight rounded to nearest and packed."""
    return pack_weight(*nearest(weight, bits, group_size, symmetric), bits=bits, group_size=group_size)


def nearest(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round a weight to nearest: q ``[N, K]``, scale ``[N, groups]``, and zero points unless symmetric.

    Bit-identical to ``epiloq.quantize.Grid``, which depends on these layers and cannot be imported here.
    """
    n, k = weight.shape
    length = k if group_size == -1 else group_size
    groups = -(-k // length)
    padded = nn.functional.pad(weight.float(), (0, groups * length - k)).view(n, groups, length)
    # Padding with zeros is allowed, since ranges include zero. A symmetric grid has one more point below zero than
    # above, so half a step is added on either side.
    low, high = padded.amin(-1), padded.amax(-1)
    span = 2 * torch.maximum(-low, high) if symmetric else high.clamp(min=0) - low.clamp(max=0)
    # The divisor is a tensor, because torch's CUDA kernels replace division by a number with a product.
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
