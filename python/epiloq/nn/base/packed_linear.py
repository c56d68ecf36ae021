"""PackedLinear: base class of linear layers with a low-bit `PackedWeight`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from epiloq._torch.calls import PLAIN
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.quantized_layer import check_positive
from epiloq.nn.base.scaled_input import SCALE
from epiloq.nn.base.stored_tensors import expected
from epiloq.ops.checks.problems import explain_problem
from epiloq.weights.computed import FLOAT_DTYPES, check_bias
from epiloq.weights.grid import Grid
from epiloq.weights.packed.checks import check_sizes, checked_perm
from epiloq.weights.packed_weight import PackedWeight, pack_weight

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
def has_kernel(bits: int, in_features: int, group_size: int) -> bool:
    """Whether a GPU multiplies a weight's integers; otherwise each call dequantises it for a dense product."""
    sizes = {"m": 1, "n": 1, "k": in_features}
    return "dense" not in explain_problem("weight_only_mm", {**sizes, "bits": bits, "group_size": group_size})


def few_bits_note(bits: int, in_features: int, group_size: int) -> str | None:
    """How a 2- or 3-bit weight runs on a GPU, for `inspect`; None if kernels support it, and for other bits."""
    if bits >= 4 or has_kernel(bits, in_features, group_size):
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
    """Round a weight to nearest: q ``[N, K]``, scale ``[N, groups]`` in its dtype, and zero points unless symmetric.

    The arithmetic is that of `epiloq.quantize.Grid`; scales of a weight that is too small for float16 are float32.
    """
    grid = Grid(bits, group_size, symmetric, weight.dtype, widens=not weight.is_meta).suited(weight)
    n, k = weight.shape
    length = grid.length(k)
    groups = -(-k // length)
    padded = nn.functional.pad(weight.float(), (0, groups * length - k)).view(n, groups, length)  # ranges include 0
    found = grid.parameters(padded.amin(-1), padded.amax(-1))
    q = grid.round(padded, found.map(lambda values: values.unsqueeze(-1))).view(n, -1)[:, :k].to(grid.dtype)
    return q, found.scale.to(grid.scale_dtype), None if found.shift is None else found.shift.to(torch.uint8)
