"""Table of the schemes of ``epiloq quantize``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epiloq.formats.layouts.base import Activations, Quantization
from epiloq.formats.table import blank
from epiloq.formats.weights import BlockWeight, ModuleWeight, Weight
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Fp8WeightOnlyLinear, OnlineQuantLinear
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.quantize.algorithms.smoothquant import INT8
from epiloq.schemes import SCHEMES
from epiloq.weights.block_quant_weight import pack_pairs
from epiloq.weights.codebooks import Calibrated, CodedWeight, Float8Grid, Fp4Grid, OffsetGrid
from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.rounding import Codebook


@dataclass(frozen=True)
class Target:
    """A scheme of `quantize_`: how weights and activations are stored.

    base
        Grid of the weights; integer grids with zero points can also be symmetric.
    activations
        For integer weights: int8 per token at run time, symmetric or with a zero point (azp), FP8 per token, or int8
        with one calibrated scale and zero point for all tokens (static); None does not quantise them.
    inputs
        How activations are rounded, for the search for SmoothQuant's alpha.
    algorithm
        Default algorithm.
    """

    name: str
    base: Grid | Float8Grid | Fp4Grid | OffsetGrid
    activations: Activations = None
    inputs: Codebook[Calibrated] = INT8
    algorithm: str = "gptq"

    @property
    def static(self) -> bool:
        """Whether activation scales are calibrated."""
        return self.activations == "int8-static"

    def grid(
        self, symmetric: bool = False, scale_dtype: torch.dtype = torch.float32, widens: bool = False
    ) -> Codebook[Calibrated]:
        """Grid of the weights; the arguments apply if the grid supports them."""
        if not isinstance(self.base, Grid):
            return self.base
        return replace(self.base, symmetric=self.base.symmetric or symmetric, scale_dtype=scale_dtype, widens=widens)

    def quantization(self, symmetric: bool = False, scale_dtype: torch.dtype = torch.float32) -> Quantization | None:
        """Return the layers' quantisation for formats of integers; None for another grid."""
        grid = self.grid(symmetric, scale_dtype)
        return Quantization(grid, self.activations) if isinstance(grid, Grid) else None

    def blank(self, shape: tuple[int, int], symmetric: bool = False) -> Weight:
        """A weight ``[N, K]`` of this kind, for testing whether a format can represent it; without values unless it
        is on an integer grid."""
        if isinstance(self.base, Grid):
            return blank(Quantization(replace(self.base, symmetric=self.base.symmetric or symmetric)), shape)
        (rows, columns), grid = shape, self.base
        stacks = 1 if grid.rows == -1 else -(-rows // grid.rows)
        scale = torch.empty(stacks, -(-columns // grid.length(columns)), device="meta")
        offset = scale if isinstance(grid, OffsetGrid) and not grid.symmetric else None
        return self.stored_form(CodedWeight(torch.empty(shape, dtype=grid.dtype, device="meta"), scale, offset, grid))

    def stored_form(self, weight: Calibrated) -> Weight:
        """A weight on its grid, in the form used by formats."""
        if isinstance(weight, QuantizedWeight):
            return weight
        scheme = SCHEMES[self.name]
        if scheme.module is Fp8BlockLinear:
            return BlockWeight(weight.q, weight.scale)
        if isinstance(weight.grid, Fp4Grid):
            state = weight.grid.stored(weight)
            state["weight"] = state.pop("weight_q")
        else:
            state = _STATES[scheme.module](weight)
        columns = weight.q.shape[1]
        return ModuleWeight(scheme.module.__name__, scheme.options, state, weight.dequantize, columns=columns)


def _online(weight: CodedWeight) -> dict[str, Tensor]:
    """State dict of ``nn.OnlineQuantLinear``."""
    narrow = isinstance(weight.grid, OffsetGrid) and weight.grid.bits == 4
    offset = {} if weight.offset is None else {"weight_offset": weight.offset}
    return {"weight": pack_pairs(weight.q) if narrow else weight.q, "weight_scale": weight.scale, **offset}


def _rows(weight: CodedWeight) -> dict[str, Tensor]:
    """State dict of ``nn.Fp8Linear``."""
    return {"weight": weight.q, "weight_scale": weight.scale.flatten()}


def _blocks(weight: CodedWeight) -> dict[str, Tensor]:
    """State dict of ``nn.Fp8WeightOnlyLinear``."""
    return {"weight": weight.q, "weight_scale": weight.scale}


_STATES: dict[type, Callable[[CodedWeight], dict[str, Tensor]]] = {
    OnlineQuantLinear: _online,
    Fp8Linear: _rows,
    Fp8WeightOnlyLinear: _blocks,
}


def _rounded(name: str, base: Float8Grid | OffsetGrid, inputs: Float8Grid | OffsetGrid) -> Target:
    # Rounding to nearest needs no text, and 8-bit weights lose little by it.
    return Target(name, base, inputs=inputs, algorithm="rtn")


_CHANNELS, _GROUPS = Grid(8, symmetric=True), Grid(4, 128, symmetric=True)
_TABLE = (
    Target("w4a8-fp8", _GROUPS, activations="fp8", inputs=Float8Grid()),
    Target("w4a8-int8", _GROUPS, activations="int8"),
    Target("w4a8-mxfp4-fp8", Fp4Grid("mxfp4"), inputs=Float8Grid()),
    Target("w4a8-nvfp4-fp8", Fp4Grid("nvfp4"), inputs=Float8Grid()),
    Target("w4a16-g128", Grid(4, 128)),
    Target("w4a16-g64", Grid(4, 64)),
    Target("w4a16-g32", Grid(4, 32)),
    Target("w4a16", Grid(4)),
    Target("w4a16-mxfp4", Fp4Grid("mxfp4")),
    Target("w4a16-nvfp4", Fp4Grid("nvfp4")),
    Target("w8a16", _CHANNELS),
    Target("w8a8-int8", _CHANNELS, activations="int8"),
    Target("w8a8-int8-azp", _CHANNELS, activations="int8-azp"),
    Target("w8a8-int8-static", _CHANNELS, activations="int8-static"),
    _rounded("w8a8-block", OffsetGrid(8, 128, symmetric=True), OffsetGrid(8, 128)),
    Target("w4a8-block", OffsetGrid(4, 128), inputs=OffsetGrid(8, 128)),
    _rounded("w4a8-block-g32", OffsetGrid(4, 32), OffsetGrid(8, 32)),
    Target("w8a16-fp8", Float8Grid(), algorithm="rtn"),
    Target("w8a16-fp8-block", Float8Grid(FP8_BLOCK, FP8_BLOCK), algorithm="rtn"),
    _rounded("fp8", Float8Grid(rows=-1), Float8Grid(rows=-1)),
    _rounded("fp8-token", Float8Grid(), Float8Grid()),
    _rounded("fp8-block", Float8Grid(FP8_BLOCK, FP8_BLOCK), Float8Grid(group_size=FP8_BLOCK)),
)
TARGETS = {target.name: target for target in _TABLE}
