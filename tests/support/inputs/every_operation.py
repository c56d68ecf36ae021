"""A valid call of every operation with every tensor it takes and writes, for tests that hold for all of them.

A new operation is covered by a new row of `OPERATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import epiloq
import operation_arguments as given
from operation_arguments import SIZE, Arguments

Shapes = tuple[tuple[int, ...], ...]

_ROWS: Shapes = ((SIZE,), (SIZE, 1))
_COLUMNS: Shapes = ((SIZE,), (1, SIZE), (SIZE, 1))
_VECTOR: Shapes = ((SIZE,),)
_ONE: Shapes = ()


class Operation(NamedTuple):
    """`call(**arguments())` is valid; `vectors` are the shapes that are documented beside one element, by argument;
    `written` are the arguments that it writes."""

    name: str
    call: Callable[..., Any]
    arguments: Callable[[], Arguments]
    vectors: dict[str, Shapes]
    written: tuple[str, ...] = ("out",)


_Q, _NONE = ("q", "scale"), ()
_PRODUCT = {"scale_a": _ROWS, "scale_b": _COLUMNS, "bias": _VECTOR}
_TWO: Shapes = ((SIZE, 2),)

OPERATIONS = (
    Operation("scaled_mm", epiloq.scaled_mm, given.products, _PRODUCT),
    Operation("scaled_mm", epiloq.scaled_mm, given.fp8_products, _PRODUCT),
    Operation("scaled_mm_azp", epiloq.scaled_mm_azp, given.azp, _PRODUCT | {"azp_adj": _VECTOR, "azp": _ROWS}),
    Operation(
        "scaled_bmm",
        epiloq.scaled_bmm,
        given.bmm,
        {"scale_a": ((2, SIZE, 1), (2, 1, 1)), "scale_b": ((2, 1, SIZE), (2, 1, 1)), "scale_out": _ONE},
    ),
    Operation(
        "groupwise_mm", epiloq.groupwise_mm, given.groupwise, {"scale_a": _TWO, "scale_b": ((2, 1),), "bias": _VECTOR}
    ),
    Operation(
        "grouped_mm",
        epiloq.grouped_mm,
        given.grouped,
        {"scale_a": _TWO, "scale_b": ((SIZE, 2, 1),), "offs": _VECTOR},
    ),
    Operation(
        "grouped_mm",
        epiloq.grouped_mm,
        given.masked,
        {"scale_a": ((2, SIZE, 1),), "scale_b": ((2, 1, SIZE),), "masked_m": ((2,),)},
    ),
    Operation("weight_only_mm", epiloq.weight_only_mm, given.packed, {"bias": _VECTOR}),
    Operation(
        "weight_only_mm",
        given.packed_by_parts,
        given.packed_parts,
        {"scale": ((1, 1, 16),), "zero": ((1, 1, 16),), "perm": _VECTOR},
    ),
    Operation("table_mm", epiloq.table_mm, given.table, {"table": _VECTOR, "scale": _VECTOR, "bias": _VECTOR}),
    Operation("fp4_mm", epiloq.fp4_mm, given.fp4, {"scale": ((SIZE, 1),), "bias": _VECTOR, "global_scale": _VECTOR}),
    Operation("fp8_weight_mm", epiloq.fp8_weight_mm, given.fp8_weight, {"scale": _VECTOR, "bias": _VECTOR}),
    Operation("packed_fp4_mm", epiloq.packed_fp4_mm, given.packed_fp4, {"bias": _VECTOR}),
    Operation("w4a8_mm", epiloq.w4a8_mm, given.w4a8, {"scale_a": _ROWS, "bias": _VECTOR}),
    Operation(
        "w4a8_mm",
        given.w4a8_by_parts,
        given.w4a8_parts,
        {"scale": ((1, 1, 16),), "zero": ((1, 1, 16),), "perm": _VECTOR},
    ),
    Operation("grouped_packed_mm", epiloq.grouped_packed_mm, given.grouped_packed, {"scale_a": ((SIZE, 1),)}),
    Operation("online_quant_mm", epiloq.online_quant_mm, given.blockwise, {"bias": _VECTOR}),
    Operation(
        "online_quant_weight",
        epiloq.online_quant_weight,
        given.block_weight,
        {name: ((SIZE, 2), (SIZE, 1), (1, 2), (1, 1)) for name in ("w_scale", "w_offset")},
        _NONE,
    ),
    Operation("conv2d_int8", epiloq.conv2d_int8, given.image, {"weight_scale": _VECTOR, "bias": _VECTOR}),
    Operation("requantized_mm", epiloq.requantized_mm, given.requantized, {"weight_scale": _VECTOR, "bias": _VECTOR}),
    Operation("conv2d_weight_only", epiloq.conv2d_weight_only, given.packed_image, {"bias": _VECTOR}),
    Operation(
        "lookup_int8",
        epiloq.lookup_int8,
        given.lookup,
        {"table": ((256,),)},
    ),
    Operation(
        "quantize_int8",
        lambda x, q, scale, azp: epiloq.quantize_int8(x, scale=scale, azp=azp, out=(q, scale, azp)),
        given.static,
        {"scale": _ROWS, "azp": _ROWS},
        ("q",),
    ),
    Operation(
        "quantize_int8",
        lambda x, q, scale, azp: epiloq.quantize_int8(x, symmetric=False, out=(q, scale, azp)),
        given.static,
        {"scale": _ROWS, "azp": _ROWS},
        ("q", "scale", "azp"),
    ),
    Operation(
        "quantize_fp8",
        given.fp8_call("token"),
        given.bounded_rows,
        {"scale": _ROWS, "scale_ub": _ONE},
        _Q,
    ),
    Operation("quantize_fp8", given.fp8_call("group"), given.rows_to(given.FP8, 2), {"scale": _TWO}, _Q),
    Operation(
        "quantize_fp8",
        given.fp8_by_blocks,
        given.fp8_blocks,
        {"scale": ((2, 2),)},
        _NONE,
    ),
    Operation(
        "quantize_blockwise_int8",
        given.quantize_blockwise,
        given.int8_blocks,
        {"scale": _TWO, "offset": _TWO, "total": _TWO},
        ("q", "scale", "offset", "total"),
    ),
    Operation(
        "rms_norm_quant",
        given.norm,
        given.norm_rows,
        {"scale": _ROWS, "weight": _VECTOR, "residual": ((SIZE, SIZE),), "residual_out": ((SIZE, SIZE),)},
        ("q", "scale", "residual_out"),
    ),
    Operation(
        "rms_norm",
        lambda x, weight, residual, out, residual_out: epiloq.rms_norm(
            x, weight, residual=residual, out=(out, residual_out)
        ),
        given.plain_norm_rows,
        {"weight": _VECTOR, "residual": ((SIZE, SIZE),), "residual_out": ((SIZE, SIZE),)},
        ("out", "residual_out"),
    ),
    Operation("silu_and_mul", epiloq.silu_and_mul, given.gated_rows, {}),
    Operation(
        "silu_and_mul",
        lambda x, out: epiloq.silu_and_mul(x, alpha=1.702, limit=7.0, offset=1.0, interleaved=True, out=out),
        given.gated_rows,
        {},
    ),
    Operation(
        "silu_and_mul_quant",
        lambda x, q, scale: epiloq.silu_and_mul_quant(x, out=(q, scale)),
        given.rows_to(torch.int8, width=2),
        {"scale": _ROWS},
        _Q,
    ),
)


def named(operations: tuple[Operation, ...] = OPERATIONS) -> list[str]:
    """An id for each row of the table."""
    return [f"{index}-{operation.name}" for index, operation in enumerate(operations)]
