"""Slices of a stored layer's tensors that belong to given rows and columns.

A rank of tensor parallelism runs some outputs (rows of the weight) or some inputs (columns) of a layer. Tensors store
rows and columns in units: a packed weight in panels of 16 rows, scales in groups of columns. Ranges that begin or end
within a unit are extended to whole units; `Window` records the surplus.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal, TypeAlias

from torch import Tensor

from epiloq.formats.layouts.base import FormatError
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.base.scaled_input import SCALE
from epiloq.weights.fp4 import FORMATS as FP4_FORMATS
from epiloq.weights.packed_layout import PADDING, PANEL_ROWS, depth_of

Axis: TypeAlias = "tuple[Literal['rows', 'columns'], int] | None"
"""The axis of a tensor's dimension, and the rows or columns per index; None if all ranks need the whole dimension."""
Rules: TypeAlias = "Mapping[str, tuple[Axis, ...]]"

_ROW: Axis = ("rows", 1)
_WEIGHT: tuple[Axis, ...] = (_ROW, ("columns", 1))
_STATIC: Rules = {"input_scale": (), "input_zero_point": ()}
_SCALED: Rules = {SCALE: (("columns", 1),)}


def _spanned(axis: Literal["rows", "columns"], size: int) -> Axis:
    return None if size == -1 else (axis, size)


def _packed(options: Mapping[str, Any]) -> Rules:
    rows: Axis = ("rows", PANEL_ROWS)
    parameters = (rows, _spanned("columns", options["group_size"]), None)
    names = dict.fromkeys(("weight_scale", "weight_zero", "weight_offset"), parameters)
    return {
        "weight_q": (rows, ("columns", depth_of(options.get("bits", 4))), None, None),
        **names,
        "weight_perm": (),
        **(_SCALED if options.get("scaled_input") else {}),
    }


def _fp8(options: Mapping[str, Any]) -> Rules:
    return {"weight": _WEIGHT, "weight_scale": (_ROW,) if options["weight"] == "channel" else (), **_STATIC}


def _fp8_blocks(options: Mapping[str, Any]) -> Rules:
    return {"weight": _WEIGHT, "weight_scale_inv": (("rows", options.get("rows", FP8_BLOCK)), ("columns", FP8_BLOCK))}


def _fp8_weight_only(options: Mapping[str, Any]) -> Rules:
    down, across = options["block"]
    return {"weight": _WEIGHT, "weight_scale": (_spanned("rows", down), _spanned("columns", across))}


def _online(options: Mapping[str, Any]) -> Rules:
    parameters: tuple[Axis, ...] = (_ROW, ("columns", options["group_size"]))
    return {
        "weight": (_ROW, ("columns", 8 // options["bits"])),
        "weight_scale": parameters,
        "weight_offset": parameters,
    }


def _fp4(options: Mapping[str, Any]) -> Rules:
    blocks: tuple[Axis, ...] = (_ROW, ("columns", FP4_FORMATS[options["format"]].block_size))
    return {
        "weight": (_ROW, ("columns", 2)),
        "weight_scale": blocks,
        "weight_global_scale": (),
        "input_scale": (),
        **_SCALED,
    }


_RULES: Mapping[str | None, Callable[[Mapping[str, Any]], Rules]] = {
    None: lambda options: {"weight": _WEIGHT},
    "Int8Linear": lambda options: {"weight": _WEIGHT, "weight_scale": (_ROW,), **_STATIC},
    "Fp8Linear": _fp8,
    "Fp8BlockLinear": _fp8_blocks,
    "Fp8WeightOnlyLinear": _fp8_weight_only,
    "OnlineQuantLinear": _online,
    "WeightOnlyLinear": _packed,
    "W4A8Linear": _packed,
    "Fp4Linear": _fp4,
    "W4A8Fp4Linear": _fp4,
}
"""The axes of a layer's tensors from its options, by the class of its module; None for a float layer."""


def rules_of(module: str | None, options: Mapping[str, Any]) -> Rules:
    """The axes of a layer's tensors. Raises FormatError for an unsupported class."""
    if module not in _RULES:
        raise FormatError(f"{module}: expected a class of layer that serving engines run")
    return _RULES[module](options)


@dataclass(frozen=True)
class Window:
    """Rows and columns `first` to `last` of a layer ``[…, in_features]``, extended to whole units.

    first_row, first_column
        Begin of the slice: at or before the first requested index.
    last_column
        End of the slice: at or after the last requested column, and at most `in_features`.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    first_row: int
    first_column: int
    last_column: int
    in_features: int

    @classmethod
    def of(cls, rules: Rules, rows: tuple[int, int], columns: tuple[int, int], in_features: int) -> Window:
        """The smallest window that contains these rows and columns, for a layer with `rules`."""
        units = {"rows": 1, "columns": PADDING if "weight_q" in rules else 1}
        for axes in rules.values():
            for axis in axes:
                if axis is not None:
                    units[axis[0]] = lcm(units[axis[0]], axis[1])
        across = units["columns"]
        last = min(-(-columns[1] // across) * across, in_features)
        return cls(
            rows, columns, rows[0] // units["rows"] * units["rows"], columns[0] // across * across, last, in_features
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of the slice."""
        return self.rows[1] - self.first_row, self.last_column - self.first_column

    @property
    def spare(self) -> tuple[int, int, int]:
        """Number of surplus rows before, and of surplus columns before and after."""
        return self.rows[0] - self.first_row, self.columns[0] - self.first_column, self.last_column - self.columns[1]

    def cut(self, tensor: Tensor, axes: Sequence[Axis]) -> Tensor:
        """The part of a tensor that belongs to the window, as a view."""
        ends = {"rows": (self.first_row, self.rows[1]), "columns": (self.first_column, self.last_column)}
        for dimension, axis in enumerate(axes):
            if axis is not None:
                first, last = ends[axis[0]]
                size = tensor.shape[dimension]
                # Packed tensors extend past the last column.
                at_end = axis[0] == "columns" and last == self.in_features
                begin, end = first // axis[1], size if at_end else min(-(-last // axis[1]), size)
                if begin > end:
                    raise FormatError(
                        f"expected at least {begin} along dimension {dimension}, got {list(tensor.shape)}"
                    )
                tensor = tensor.narrow(dimension, begin, end - begin)
        return tensor
