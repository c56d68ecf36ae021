"""PackedFp4Experts: linear layers of a mixture of experts with FP4 weights, MXFP4 or NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq._torch.calls import reads_values
from epiloq.nn.base.prepared_linear import FP8_BLOCK, check_choice
from epiloq.nn.base.w4a8_layer import ACTIVATIONS, GROUPS
from epiloq.nn.experts.expert_linears import gathered
from epiloq.nn.experts.packed_experts import PanelExperts, QuantizedTokenProduct
from epiloq.nn.experts.row_experts import ExpertRows, Experts
from epiloq.nn.fp4_linear import packed_part
from epiloq.weights.fp4 import FORMATS, divisor_of
from epiloq.weights.packed_fp4_weight import (
    ONE,
    PackedFp4Weight,
    shapes_of_parts,
    unpacked_codes,
    unpacked_scales,
    without_codes_of_zeros,
)
from epiloq.weights.packed_layout import PANEL_ROWS, parameter_of

_GLOBAL = "weight_global_scale"


class PackedFp4Experts(PanelExperts):
    __doc__ = f"""{Experts.__doc__}
    Weights are E2M1 numbers in blocks that share a scale, and activations are floating-point, as in `Fp4Linear`. The
    product is `epiloq.packed_fp4_mm`, which documents when one kernel multiplies all experts.

    format, reciprocal
        As for `Fp4Linear`.
    matrices
        Number of equally high matrices that are stacked in each expert's. For "nvfp4" each one has its own global
        scale; if those differ, each row is multiplied by each matrix as if by a separate expert.

    Parameters without gradients, which form the state dict (E = experts):
        weight_q, weight_scale  uint8, as in ``epiloq.PackedFp4Weight``, with the experts' panels stacked
        weight_global_scale     float32 [E matrices], for "nvfp4": the global scales or, by default, their reciprocals
    """

    PARTS = ("weight_q", "weight_scale", _GLOBAL)

    weight_global_scale: Tensor | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        format: str = "nvfp4",
        reciprocal: bool = True,
        matrices: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        check_choice(type(self).__name__, "format", format, tuple(FORMATS))
        if matrices < 1 or (matrices > 1 and out_features % (matrices * PANEL_ROWS)):
            raise ValueError(
                f"{type(self).__name__}: matrices: expected 1, or as many of a multiple of {PANEL_ROWS} rows as make "
                f"{out_features}, got {matrices}"
            )
        self.format, self.reciprocal, self.matrices = format, reciprocal, matrices
        super().__init__(experts, in_features, out_features, device=device)

    def _hold_weight(self, device: torch.device | str | None) -> None:
        self._hold_part("q", device)

    def _hold_scales(self, device: torch.device | str | None) -> None:
        self._hold_part("scale", device)
        shape, wanted = (self.experts * self.matrices,), FORMATS[self.format].has_global_scale
        self._hold(_GLOBAL, shape, (1,), torch.float32, device, wanted)

    def _hold_part(self, name: str, device: torch.device | str | None) -> None:
        panels, *rest = shapes_of_parts(self.format, self.out_features, self.in_features)[name]
        shape = (self.experts * panels, *rest)
        self._hold(f"weight_{name}", shape, (1,) * len(shape), torch.uint8, device)

    @property
    def _rows_of_matrix(self) -> int:
        return self.out_features // self.matrices

    def _fill_expert(self, expert: int, values: Tensor) -> None:
        for begin in range(0, self.out_features, self._rows_of_matrix):
            matrix = values[begin : begin + self._rows_of_matrix]
            divisor = divisor_of(matrix) if FORMATS[self.format].has_global_scale else None
            global_scale = None if divisor is None else divisor.reciprocal()
            codes, scale, _ = epiloq.fp4_quantize(matrix, self.format, global_scale=global_scale)
            packed = epiloq.pack_fp4_weight(codes, scale, in_features=self.in_features)
            found = {"weight_q": packed.q, "weight_scale": packed.scale}
            found |= {} if divisor is None else {_GLOBAL: divisor if self.reciprocal else divisor.reciprocal()}
            for name, place in self.places(expert, begin, len(matrix)).items():
                place.copy_(found[name])

    def places(self, expert: int, begin: int, rows: int) -> dict[str, Tensor]:
        first = expert * self._panels + begin // PANEL_ROWS
        panels = slice(first, first - (-rows // PANEL_ROWS))
        matrix = expert * self.matrices + begin // self._rows_of_matrix
        where = {"weight_q": panels, "weight_scale": panels, _GLOBAL: slice(matrix, matrix + 1)}
        return {name: self.get_parameter(name)[where[name]] for name in self.held_parts}

    def as_in_files(self, parts: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        k = self.in_features
        return {
            **parts,
            "weight_q": unpacked_codes(parts["weight_q"], rows, k),
            "weight_scale": unpacked_scales(parts["weight_scale"], self.format, rows, k),
        }

    def fitting(self, name: str, given: Tensor, held: Tensor, rows: int) -> Tensor | str:
        found = packed_part(name, given, self.format, rows, self.in_features)
        if found is not None:
            return found
        if given.shape != held.shape or given.dtype != held.dtype:
            return f"expected {held.dtype} {list(held.shape)}, got {given.dtype} {list(given.shape)}"
        return given

    def clear(self, begin: int, end: int) -> None:
        """Zero the codes of every expert's padding rows, and set their scales to 1."""
        for row in range(begin, end):
            panel, place = row // PANEL_ROWS, row % PANEL_ROWS
            # Two rows share the bytes of four lanes, one in each half of a byte.
            lanes, other = slice(place % 8 * 4, place % 8 * 4 + 4), 0xF0 if place < 8 else 0x0F
            self.weight_q[panel :: self._panels, :, lanes] &= other
            self.weight_scale[panel :: self._panels, :, parameter_of(place)] = ONE[self.format]

    def _make(self) -> Any:
        """There is one global scale per expert if its matrices have the same one, otherwise one per matrix."""
        q, scale, divisor = (self._padded(name) for name in self.PARTS)
        assert q is not None and scale is not None
        q = without_codes_of_zeros(q, scale, FORMATS[self.format])
        if divisor is None:
            return q, scale, None
        global_scale = divisor.reciprocal() if self.reciprocal else divisor
        each = global_scale.view(self.experts, self.matrices)
        if reads_values(global_scale) and not global_scale.is_meta and bool((each == each[:, :1]).all()):
            global_scale = each[:, 0].contiguous()
        return q, scale, global_scale

    def _value(self, q: Tensor, scale: Tensor, global_scale: Tensor | None, rows: int) -> PackedFp4Weight:
        return PackedFp4Weight(q, scale, global_scale, self.format, rows, self.in_features)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        q, scale, global_scale = tensors
        return self._value(q, scale, global_scale, self.out_features).dequantize()[first:last]

    def multiply(self, q: Tensor, scale: Tensor | None, out_dtype: torch.dtype, rows: ExpertRows) -> Tensor:
        x, (codes, scales, global_scale) = q[..., : self.in_features], self._made
        weight = self._value(codes, scales, global_scale, self.experts * self._panels * PANEL_ROWS)
        if global_scale is None or global_scale.numel() == self.experts:
            return self._product(x, scale, weight, out_dtype, rows)
        if rows.masked_m is not None:
            counts = rows.masked_m.repeat_interleave(self.matrices)
            expert = torch.arange(self.experts, device=x.device).repeat_interleave(self.matrices)
            x, scale = gathered(x, scale, expert, False)
            y = self._product(x, scale, weight, out_dtype, ExpertRows(masked_m=counts))
            return y.view(self.experts, self.matrices, *y.shape[1:]).transpose(1, 2).flatten(2)
        assert rows.offs is not None
        places, ends = _for_each_matrix(rows.offs, x.shape[0], self.matrices)
        source = torch.empty_like(places).view(-1)
        source[places.flatten()] = torch.arange(x.shape[0], device=x.device).repeat_interleave(self.matrices)
        x, scale = gathered(x, scale, source, False)
        return self._product(x, scale, weight, out_dtype, ExpertRows(ends))[places].flatten(1)

    def _product(
        self, x: Tensor, scale: Tensor | None, weight: PackedFp4Weight, out_dtype: torch.dtype, rows: ExpertRows
    ) -> Tensor:
        """Product of the rows of each matrix with it."""
        return epiloq.packed_fp4_mm(x, weight, offs=rows.offs, masked_m=rows.masked_m)


class W4A8Fp4Experts(QuantizedTokenProduct, PackedFp4Experts):
    __doc__ = f"""{Experts.__doc__}
    Weights are E2M1 numbers in blocks that share a scale, and activations are FP8 or int8 with a dynamic scale per
    token, or FP8 with one per token and group, as in `W4A8Fp4Linear`. The product is `epiloq.grouped_packed_mm`, which
    documents when one kernel multiplies all experts.

    activation
        As for `W4A8Fp4Linear`, without "fp8-static".
    format, reciprocal, matrices
        As for `PackedFp4Experts`.

    Parameters without gradients, which form the state dict: those of `PackedFp4Experts`.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        format: str = "mxfp4",
        activation: str = "fp8",
        reciprocal: bool = True,
        matrices: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        check_choice(type(self).__name__, "activation", activation, (*ACTIVATIONS, GROUPS))
        self.activation = activation
        options: dict[str, Any] = {"format": format, "reciprocal": reciprocal, "matrices": matrices, "device": device}
        super().__init__(experts, in_features, out_features, **options)

    @property
    def quantize_options(self) -> Mapping[str, Any]:
        if self.activation == GROUPS:
            return {"granularity": "group", "group_size": FP8_BLOCK, "dtype": torch.float8_e4m3fn}
        return {"dtype": ACTIVATIONS[self.activation]}  # torch.compile cannot read super()'s property


def _for_each_matrix(offs: Tensor, rows: int, matrices: int) -> tuple[Tensor, Tensor]:
    """Positions ``[rows, matrices]`` of rows sorted by expert if each expert's rows are repeated for each of its
    matrices, and their ends, int32 ``[E matrices]``. Nothing is read back to the host."""
    ends = torch.cat((offs.new_zeros(1), offs, offs.new_full((1,), rows))).long()
    begins, counts = ends[:-1], ends[1:] - ends[:-1]
    row, matrix = (torch.arange(size, device=offs.device) for size in (rows, matrices))
    expert = torch.searchsorted(ends[1:], row, right=True)
    places = (begins[expert] * (matrices - 1) + row)[:, None] + matrix * counts[expert][:, None]
    found = begins[:-1, None] * matrices + (matrix + 1) * counts[:-1, None]
    return places, found.flatten().to(torch.int32)
