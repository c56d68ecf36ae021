"""PackedExperts: linear layers of a mixture of experts with low-bit weights and 16- or 8-bit activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq.nn.base.packed_linear import packed_nearest
from epiloq.nn.base.prepared_linear import check_choice, kernel_dtype
from epiloq.nn.base.w4a8_layer import ACTIVATIONS
from epiloq.nn.experts.row_experts import ExpertRows, Experts, TokenQuantizedExperts
from epiloq.weights.packed.checks import check_sizes
from epiloq.weights.packed_layout import PANEL_ROWS, parameter_of, shapes_of
from epiloq.weights.packed_weight import PackedWeight


class PanelExperts(Experts):
    """`Experts` whose packed weights are stacked panels of `PANEL_ROWS` rows. Base class."""

    WEIGHT_DTYPE = torch.uint8
    SCALE, ROWS_PER_SCALE, IN_PANELS = "weight_scale", PANEL_ROWS, True

    weight_scale: Tensor

    @property
    def padded_in_features(self) -> int:
        return self.in_features

    @property
    def _panels(self) -> int:
        """Number of panels per expert."""
        return -(-self.out_features // PANEL_ROWS)

    def _of_expert(self, parts: Sequence[Tensor | None], expert: int) -> list[Tensor | None]:
        stacked = [None if part is None else part.unflatten(0, (self.experts, -1)) for part in parts]
        return super()._of_expert(stacked, expert)


class PackedExperts(PanelExperts):
    __doc__ = f"""{Experts.__doc__}
    Weights have 2, 3, 4 or 8 bits and activations are floating-point, as in `WeightOnlyLinear`. The product is
    `epiloq.grouped_packed_mm`, which documents when one kernel multiplies all experts.

    Parameters without gradients, which form the state dict: `weight_q`, `weight_scale` and, if present, `weight_zero`
    or `weight_offset`, as described for ``epiloq.PackedWeight``, with the experts' panels stacked.
    """

    PARTS = ("weight_q", "weight_scale", "weight_zero", "weight_offset")

    weight_zero: Tensor | None
    weight_offset: Tensor | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        bits: int = 4,
        group_size: int = 128,
        zeros: str = "none",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        check_sizes(bits, group_size, type(self).__name__)
        check_choice(type(self).__name__, "zeros", zeros, ("none", "zero", "offset"))
        self.bits, self.group_size, self.zeros, self.scale_dtype = bits, group_size, zeros, dtype
        super().__init__(experts, in_features, out_features, device=device)

    def _hold_weight(self, device: torch.device | str | None) -> None:
        self._hold_part("weight_q", torch.uint8, device)

    def _hold_scales(self, device: torch.device | str | None) -> None:
        self._hold_part("weight_scale", self.scale_dtype, device)
        self._hold_part("weight_zero", torch.uint8, device, self.zeros == "zero")
        self._hold_part("weight_offset", self.scale_dtype, device, self.zeros == "offset")

    def _hold_part(self, name: str, dtype: torch.dtype, device: torch.device | str | None, wanted: bool = True) -> None:
        shapes = shapes_of(self.bits, self.out_features, self.in_features, self.group_size)
        panels, *rest = shapes[name.removeprefix("weight_")]
        shape = (self.experts * panels, *rest)
        self._hold(name, shape, (1,) * len(shape), dtype, device, wanted)

    def _fill_expert(self, expert: int, values: Tensor) -> None:
        packed = packed_nearest(values, self.bits, self.group_size, self.zeros == "none")
        for name, place in self.places(expert, 0, self.out_features).items():
            place.copy_(packed.state_dict()[name.removeprefix("weight_")])

    def places(self, expert: int, begin: int, rows: int) -> dict[str, Tensor]:
        first = expert * self._panels + begin // PANEL_ROWS
        return {name: self.get_parameter(name)[first : first - (-rows // PANEL_ROWS)] for name in self.held_parts}

    def clear(self, begin: int, end: int) -> None:
        """Zero the scales and offsets of every expert's padding rows, so that a product with such a row is 0."""
        for row in range(begin, end):
            panel, place = row // PANEL_ROWS, row % PANEL_ROWS
            for name in ("weight_scale", "weight_offset"):
                if self._parameters[name] is not None:
                    self.get_parameter(name)[panel :: self._panels, :, parameter_of(place)] = 0

    def _value(self, parts: Any, rows: int) -> PackedWeight:
        q, scale, zero, offset = parts
        return PackedWeight(q, scale, zero, offset, None, self.bits, rows, self.in_features, self.group_size)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        return self._value(tensors, self.out_features).row_slice(first, last).dequantize()

    def multiply(self, q: Tensor, scale: Tensor | None, out_dtype: torch.dtype, rows: ExpertRows) -> Tensor:
        weight = self._value(self._made, self.experts * self._panels * PANEL_ROWS)
        return self._product(q[..., : self.in_features], scale, weight, out_dtype, rows)

    def _product(
        self, x: Tensor, scale: Tensor | None, weight: PackedWeight, out_dtype: torch.dtype, rows: ExpertRows
    ) -> Tensor:
        return epiloq.grouped_packed_mm(x, weight, offs=rows.offs, masked_m=rows.masked_m)


class QuantizedTokenProduct(TokenQuantizedExperts):
    """`TokenQuantizedExperts` with packed weights. Base class."""

    def _product(
        self, x: Tensor, scale: Tensor | None, weight: Any, out_dtype: torch.dtype, rows: ExpertRows
    ) -> Tensor:
        written = kernel_dtype(x, out_dtype)
        y = epiloq.grouped_packed_mm(x, weight, scale, offs=rows.offs, masked_m=rows.masked_m, out_dtype=written)
        return y.to(out_dtype)


class W4A8Experts(QuantizedTokenProduct, PackedExperts):
    __doc__ = f"""{Experts.__doc__}
    Weights have 4 bits, and activations are FP8 or int8 with a dynamic scale per token, as in `W4A8Linear`. The
    product is `epiloq.grouped_packed_mm`, which documents when one kernel multiplies all experts.

    Parameters without gradients, which form the state dict: those of `PackedExperts`.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        activation: str = "fp8",
        group_size: int = 128,
        zeros: str = "none",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        check_choice("W4A8Experts", "activation", activation, tuple(ACTIVATIONS))
        check_choice("W4A8Experts", "zeros", zeros, ("none", "zero"))
        self.activation = activation
        options: dict[str, Any] = {"group_size": group_size, "zeros": zeros, "dtype": dtype, "device": device}
        super().__init__(experts, in_features, out_features, **options)
