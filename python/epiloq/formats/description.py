"""Description of how one layer of a checkpoint is quantised; readers and writers are derived from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from epiloq.formats.layouts.base import Activations, FormatError, Quantization
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.base.w4a8_layer import GROUPS, STATIC
from epiloq.weights.fp4 import FORMATS as FP4_FORMATS
from epiloq.weights.grid import Grid

Kind = Literal["int", "fp8", "fp4", "table"]
INT4_FOR_FP8 = "modelopt int4 fp8"
INT8_OF_BITSANDBYTES, TABLE_OF_BITSANDBYTES = "bitsandbytes int8", "bitsandbytes 4 bits"
TORCHAO_OFFSETS = "torchao int4 with offsets"
OFFSETS = frozenset({"gemv_fast", TORCHAO_OFFSETS})
"""Layouts whose groups have real offsets instead of integer zero points."""
FP4_EXPERTS = ("fp4 experts", "fp4 experts by scale")
"""The layouts of DeepSeek's FP4 experts, whose activations stay in floating point: their products have few rows and are
limited by reading weights, and quantised rows would be converted back to bfloat16."""
FP4_OF_BLOCKS = {one.block_size: name for name, one in FP4_FORMATS.items()}
"""FP4 formats by block size (the number of weights that share a scale)."""


@dataclass(frozen=True)
class Inputs:
    """Quantisation of activations: to 8 bits, or to 4 for FP4.

    strategy
        Granularity of scales: "token", "tensor", or "group" (of `group_size` features of a token).
    dynamic
        Whether scales are computed at run time; otherwise they are in the files.
    limit
        Activations are clamped to this magnitude first; None for no limit.
    """

    kind: Kind
    strategy: str
    dynamic: bool = True
    symmetric: bool = True
    group_size: int = -1
    limit: float | None = None

    def __str__(self) -> str:
        kind = {"fp8": "FP8", "fp4": "FP4"}.get(self.kind, "int8")
        size = f" of {self.group_size}" if self.group_size > 0 else ""
        when = "with scales computed at run time" if self.dynamic else "with scales in the files"
        return f"{kind} per {self.strategy}{size}{'' if self.symmetric else ' with zero points'}, {when}"


_FP8_GROUPS = Inputs("fp8", "group", group_size=FP8_BLOCK)
INPUTS_OF_FP4 = {
    "fp8": Inputs("fp8", "token"),
    "int8": Inputs("int", "token"),
    GROUPS: _FP8_GROUPS,
    STATIC: Inputs("fp8", "tensor", dynamic=False),
}
"""How `nn.W4A8Fp4Linear` quantises activations, by the name of the kind."""


@dataclass(frozen=True)
class Description:
    """Quantisation of a layer, and the layout of its tensors in files.

    layout
        The name of the layout of its tensors, a key of `layout_table.LAYOUTS`.
    kind, bits
        Number type of the weights: integers of `bits` bits, float8_e4m3fn, E2M1 (fp4), or indices of `bits` bits into
        a table.
    strategy
        Granularity of scales: "tensor", "channel", "group" (of `group_size` input features) or "block" (of `block`
        rows and columns).
    symmetric
        Whether there are no zero points (or offsets).
    ordered
        Whether groups may be in activation order; the files must then contain the order.
    inputs
        How activations are quantised; None leaves them in floating point.
    scaled
        Whether inputs are multiplied by a vector of the files first.
    powers_of_two
        Whether the files describe scales of activations that are rounded up to powers of two.
    left
        How the files describe activations that stay in floating point, because no layer quantises them so; None if
        `inputs` says it.
    """

    layout: str
    kind: Kind = "int"
    bits: int = 8
    strategy: str = "channel"
    group_size: int = -1
    block: tuple[int, int] | None = None
    symmetric: bool = True
    ordered: bool = False
    inputs: Inputs | None = None
    scaled: bool = False
    powers_of_two: bool = False
    left: Inputs | None = None

    def __post_init__(self) -> None:
        inputs = () if self.inputs is None else (self.inputs.group_size,)
        for size in (self.group_size, *(self.block or ()), *inputs):
            if type(size) is int and size >= 1 << 31:
                raise FormatError(f"quantization_config: expected groups and blocks of less than 2^31, got {size}")

    @property
    def grid(self) -> Grid | None:
        """The grid of integer weights with integer zero points or none; None for other weights. Raises FormatError for
        bits or groups that no grid has."""
        if self.kind != "int" or self.layout in OFFSETS:
            return None
        try:
            return Grid(self.bits, self.group_size, self.symmetric)
        except ValueError as error:
            raise FormatError(f"quantization_config: {str(error).removeprefix('Grid: ')}") from None

    @property
    def quantization(self) -> Quantization | None:
        """The `Quantization` of integer weights, for formats of integers; None for other weights. Raises FormatError if
        no layer runs it."""
        grid = self.grid
        return None if grid is None else Quantization(grid, self._activations())

    def _activations(self) -> Activations:
        if self.inputs is None:
            return None
        found = self.inputs
        grouped = self.strategy == "group" or not self.symmetric
        if self.bits == 4 and found.strategy == "token" and found.dynamic and found.symmetric:
            return "fp8" if found.kind == "fp8" else "int8"
        if grouped and self.bits == 4:
            raise FormatError(
                "input_activations: expected symmetric int8 or FP8 per token, with scales computed at run time, for "
                f"{self.weights}, got {found}"
            )
        if grouped:
            raise FormatError(f"int8 activations: expected symmetric weights per channel or tensor, got {self.weights}")
        if found.kind == "int" and found.strategy == "token" and found.dynamic:
            return "int8" if found.symmetric else "int8-azp"
        if found.kind == "int" and found.strategy == "tensor" and not found.dynamic:
            return "int8-static"
        raise FormatError(
            "input_activations: with integer weights expected none, 8 bits per token at run time (FP8 with 4 bits), or "
            f"8 bits with one scale, got {found}"
        )

    @property
    def is_static(self) -> bool:
        """Whether the scale of activations is in the files."""
        return self.inputs is not None and not self.inputs.dynamic

    @property
    def weights(self) -> str:
        """Description of the weights."""
        what = {"fp8": "fp8", "fp4": "fp4", "table": f"{self.bits}-bit table"}.get(self.kind, f"int{self.bits}")
        size = {"group": f" of {self.group_size}", "block": f" of {self.block}"}.get(self.strategy, "")
        return f"{what} per {self.strategy}{size}, {'symmetric' if self.symmetric else 'asymmetric'}"

    @property
    def rows(self) -> int | None:
        """Number of rows per scale in a kernel that multiplies these blocks: 128 or 1; None without such a kernel."""
        if self.block is None or self.block[1] != FP8_BLOCK:
            return None
        return 1 if self.block[0] % FP8_BLOCK else FP8_BLOCK

    @property
    def module(self) -> tuple[str, Mapping[str, Any]]:
        """The class, and its options, of the module that runs a layer with non-integer weights.

        Raises FormatError if there is none.
        """
        if self.kind == "table":
            return "TableLinear", {"block_size": self.group_size}
        if self.kind == "fp4":
            options = {"format": FP4_OF_BLOCKS[self.group_size]}
            kind = self.kind_of_inputs
            return ("Fp4Linear", options) if kind is None else ("W4A8Fp4Linear", {**options, "activation": kind})
        inputs = self.inputs
        if inputs is None or (self.strategy == "block" and self.rows is None):
            return "Fp8WeightOnlyLinear", {"block": self.spans}
        if self.strategy == "block":
            if inputs != _FP8_GROUPS:
                raise FormatError(
                    f"input_activations: expected symmetric FP8 in groups of {FP8_BLOCK} (group), got {inputs}"
                )
            return "Fp8BlockLinear", {} if self.rows == FP8_BLOCK else {"rows": self.rows}
        activation = "static" if not inputs.dynamic else inputs.strategy
        if inputs.kind != "fp8" or inputs.strategy not in ("token", "tensor") or not inputs.symmetric:
            raise FormatError(f"input_activations: expected symmetric FP8 (token or tensor or static), got {inputs}")
        limit = {} if inputs.limit is None else {"limit": inputs.limit}
        return "Fp8Linear", {"activation": activation, "weight": self.strategy, **limit}

    @property
    def kind_of_inputs(self) -> str | None:
        """With FP4 weights: how `nn.W4A8Fp4Linear` quantises activations; None if they stay in floating point."""
        if self.kind != "fp4" or self.scaled or self.layout in FP4_EXPERTS:
            return None
        return next((name for name, inputs in INPUTS_OF_FP4.items() if inputs == self.inputs), None)

    @property
    def spans(self) -> tuple[int, int]:
        """Numbers of rows and columns of a weight that share a scale, -1 for all."""
        return self.block or {"tensor": (-1, -1), "channel": (1, -1)}.get(self.strategy, (1, self.group_size))

    @property
    def loss(self) -> str | None:
        """The difference between epiloq's computation and the described one; None if there is none."""
        if self.kind == "fp8" and self.strategy == "block" and self.inputs is not None and self.rows is None:
            assert self.block is not None
            rows, columns = self.block
            return (
                f"no kernel supports FP8 blocks of {rows} x {columns}: weights are dequantised, and activations stay "
                "in floating point"
            )
        if self.kind == "fp4" and self.inputs is not None and self.kind_of_inputs is None:
            return f"FP4 weights are used as they are, but activations stay in floating point, not in {self.inputs}"
        if self.left is not None:
            return (
                f"{self.weights} weights are used as they are; activations stay in floating point, not in {self.left}"
            )
        if self.layout == INT4_FOR_FP8:
            return (
                "int4 weights are used as they are, not rounded to FP8, and activations stay in floating point, not in "
                "FP8"
            )
        if self.layout == INT8_OF_BITSANDBYTES:
            return "activations stay in floating point, where bitsandbytes (LLM.int8) quantises them too"
        if self.powers_of_two:
            return (
                "scales of activations are not rounded up to powers of two (scale_fmt ue8m0), which is closer to the "
                "floating-point model"
            )
        return None


Rules: TypeAlias = Callable[[Sequence[str], "type[nn.Module]"], "Description | None"]
"""A layer's description in a configuration, given its names (in the model and in the files) and its class; None if it
is not quantised."""


def activations(described: Activations) -> Inputs | None:
    """The inverse of `Description.quantization`, for activations."""
    if described is None:
        return None
    strategy = "tensor" if described == "int8-static" else "token"
    kind: Kind = "fp8" if described == "fp8" else "int"
    return Inputs(kind, strategy, dynamic=strategy == "token", symmetric=described in ("int8", "fp8"))


def of_grid(quantization: Quantization, layout: str, ordered: bool = False) -> Description:
    """The description of integer weights on a grid in a layout."""
    grid = quantization.grid
    return Description(
        layout,
        "int",
        grid.bits,
        "channel" if grid.group_size == -1 else "group",
        grid.group_size,
        symmetric=grid.symmetric,
        ordered=ordered,
        inputs=activations(quantization.activations),
    )
