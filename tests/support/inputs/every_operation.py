"""A valid call of every operation with every tensor it takes and writes, for tests that hold for all of them.

A new operation is covered by a new row of `OPERATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import epiloq

Arguments = dict[str, Any]
Shapes = tuple[tuple[int, ...], ...]

# One size for rows, columns and depth: what has the right number of elements by accident broadcasts by accident.
SIZE = 16
_ROWS: Shapes = ((SIZE,), (SIZE, 1))
_COLUMNS: Shapes = ((SIZE,), (1, SIZE), (SIZE, 1))
_VECTOR: Shapes = ((SIZE,),)
_ONE: Shapes = ()
FP8 = torch.float8_e4m3fn


class Operation(NamedTuple):
    """`call(**arguments())` is valid; `vectors` are the shapes that are documented beside one element, by argument;
    `written` are the arguments that it writes."""

    name: str
    call: Callable[..., Any]
    arguments: Callable[[], Arguments]
    vectors: dict[str, Shapes]
    written: tuple[str, ...] = ("out",)


def ints(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(-100, 100, shape).to(dtype)


def fp8(*shape: int) -> Tensor:
    return torch.randn(*shape).to(FP8)


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape) * 0.02 + 1e-3


def _products(make: Callable[..., Tensor] = ints) -> Arguments:
    return {
        "a": make(SIZE, SIZE),
        "b": make(SIZE, SIZE).t(),
        "scale_a": positive(SIZE, 1),
        "scale_b": positive(SIZE),
        "bias": torch.randn(SIZE).bfloat16(),
        "out": torch.full((SIZE, SIZE), 7.0).bfloat16(),
    }


def _azp() -> Arguments:
    return _products() | {"azp_adj": ints(SIZE, dtype=torch.int32), "azp": ints(SIZE, 1, dtype=torch.int32)}


def _bmm() -> Arguments:
    return {
        "a": ints(2, SIZE, SIZE),
        "b": ints(2, SIZE, SIZE).mT,
        "scale_a": positive(2, SIZE, 1),
        "scale_b": positive(2, 1, SIZE),
        "scale_out": positive(1),
        "out": ints(2, SIZE, SIZE),
    }


def _groupwise() -> Arguments:
    k = 256
    return {
        "a": fp8(SIZE, k),
        "b": fp8(SIZE, k).t(),
        "scale_a": positive(SIZE, 2),
        "scale_b": positive(2, -(-SIZE // 128)),
        "bias": torch.randn(SIZE).bfloat16(),
        "out": torch.full((SIZE, SIZE), 7.0).bfloat16(),
    }


def _grouped() -> Arguments:
    k, experts = 256, SIZE
    return {
        "a": fp8(SIZE, k),
        "b": fp8(experts, SIZE, k).mT,
        "scale_a": positive(SIZE, 2),
        "scale_b": positive(experts, 2, -(-SIZE // 128)),
        "offs": torch.arange(1, experts + 1, dtype=torch.int32),
        "out": torch.full((SIZE, SIZE), 7.0).bfloat16(),
    }


def _masked() -> Arguments:
    experts = 2
    return {
        "a": ints(experts, SIZE, SIZE),
        "b": ints(experts, SIZE, SIZE).mT,
        "scale_a": positive(experts, SIZE, 1),
        "scale_b": positive(experts, 1, SIZE),
        "masked_m": torch.tensor([3, SIZE], dtype=torch.int32),
        "recipe": (1, 1, -1),
        "out": torch.full((experts, SIZE, SIZE), 7.0).bfloat16(),
    }


def _few_bits() -> Arguments:
    zero = torch.randint(0, 16, (SIZE, 1), dtype=torch.uint8)
    weight = epiloq.pack_weight(
        torch.randint(0, 16, (SIZE, SIZE)), positive(SIZE, 1), zero, bits=4, group_size=-1, perm=torch.randperm(SIZE)
    )
    out = torch.full((SIZE, SIZE), 7.0)
    return {"x": torch.randn(SIZE, SIZE), "weight": weight, "bias": torch.randn(SIZE), "out": out}


def _few_bits_of(x: Tensor, weight: Any, bias: Tensor, out: Tensor, **parts: Tensor) -> Tensor:
    tensors = weight.state_dict() | parts
    numbers = {name: getattr(weight, name) for name in ("bits", "n", "k", "group_size")}
    whole = epiloq.PackedWeight(**{"zero": None, "offset": None, "perm": None} | tensors, **numbers)
    return epiloq.weight_only_mm(x, whole, bias, out=out)


def _of_float8() -> Arguments:
    return {
        "x": torch.randn(SIZE, SIZE),
        "weight": fp8(SIZE, SIZE),
        "scale": positive(SIZE, 1),
        "bias": torch.randn(SIZE),
        "out": torch.full((SIZE, SIZE), 7.0),
    }


def _of_a_table() -> Arguments:
    return {
        "x": torch.randn(SIZE, SIZE),
        "codes": torch.randint(0, 256, (SIZE * SIZE // 2,), dtype=torch.uint8),
        "table": torch.randn(16),
        "scale": positive(SIZE),
        "bias": torch.randn(SIZE),
        "out_features": SIZE,
        "block_size": SIZE,
        "out": torch.full((SIZE, SIZE), 7.0),
    }


def _fp4() -> Arguments:
    return {
        "x": torch.randn(SIZE, SIZE),
        "codes": torch.randint(0, 256, (SIZE, SIZE // 2), dtype=torch.uint8),
        "scale": torch.randint(110, 130, (SIZE, -(-SIZE // 32)), dtype=torch.uint8),
        "bias": torch.randn(SIZE),
        "global_scale": positive(SIZE),
        "out": torch.full((SIZE, SIZE), 7.0),
    }


def _packed_fp4() -> Arguments:
    codes = torch.randint(0, 256, (SIZE, SIZE // 2), dtype=torch.uint8)
    scale = torch.randint(110, 130, (SIZE, -(-SIZE // 32)), dtype=torch.uint8)
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=SIZE, factor=positive(1))
    out = torch.full((SIZE, SIZE), 7.0)
    return {"x": torch.randn(SIZE, SIZE), "weight": weight, "bias": torch.randn(SIZE), "out": out}


def _w4a8() -> Arguments:
    weight, out = _few_bits()["weight"], torch.full((SIZE, SIZE), 7.0).bfloat16()
    bias = torch.randn(SIZE).bfloat16()
    return {"x_q": fp8(SIZE, SIZE), "weight": weight, "scale_a": positive(SIZE, 1), "bias": bias, "out": out}


def _w4a8_of(x_q: Tensor, weight: Any, scale_a: Tensor, bias: Tensor, out: Tensor, **parts: Tensor) -> Tensor:
    numbers = {name: getattr(weight, name) for name in ("bits", "n", "k", "group_size")}
    whole = epiloq.PackedWeight(**{"offset": None} | weight.state_dict() | parts, **numbers)
    return epiloq.w4a8_mm(x_q, whole, scale_a, bias, out=out)


def _grouped_packed() -> Arguments:
    weight = epiloq.pack_weight(ints(2 * SIZE, SIZE) % 8, positive(2 * SIZE, 1), bits=4, group_size=-1)
    return {
        "x": fp8(SIZE, SIZE),
        "weight": weight,
        "scale_a": positive(SIZE, 1),
        "offs": torch.tensor([5, SIZE], dtype=torch.int32),
        "out": torch.full((SIZE, SIZE), 7.0).bfloat16(),
    }


def _in_blocks() -> Arguments:
    weight = epiloq.online_quant_weight(ints(SIZE, SIZE), positive(SIZE, 2), positive(SIZE, 2), group_size=SIZE // 2)
    out = torch.full((SIZE, SIZE), 7.0)
    return {"x": torch.randn(SIZE, SIZE), "w_q": weight, "bias": torch.randn(SIZE), "out": out}


def _block_weight() -> Arguments:
    return {
        "w_q": ints(SIZE, SIZE),
        "w_scale": positive(SIZE, 2),
        "w_offset": positive(SIZE, 2),
        "group_size": SIZE // 2,
    }


def _image() -> Arguments:
    return {
        "x_q": ints(2, 4, 4, SIZE).permute(0, 3, 1, 2),
        "weight": ints(SIZE, 1, 1, SIZE),
        "bias": torch.randn(SIZE),
        "input_scale": 0.02,
        "input_zero": 3,
        "weight_scale": positive(SIZE),
        "output_scale": 0.1,
        "out": ints(2, 4, 4, SIZE).permute(0, 3, 1, 2),
    }


def _requantized() -> Arguments:
    return {name: value for name, value in _image().items() if name != "out"} | {
        "x_q": ints(SIZE, SIZE),
        "weight": ints(SIZE, SIZE),
    }


def _image_of_few_bits() -> Arguments:
    return {
        "x": torch.randn(2, SIZE, 4, 4).contiguous(memory_format=torch.channels_last),
        "weight": epiloq.pack_conv2d_weight(ints(SIZE, 3, 3, SIZE) % 8, positive(SIZE), bits=4, group_size=-1),
        "bias": torch.randn(SIZE),
        "padding": 1,
        "out": torch.full((2, SIZE, 4, 4), 7.0).contiguous(memory_format=torch.channels_last),
    }


def _static() -> Arguments:
    azp = ints(SIZE, 1, dtype=torch.int32)
    return {"x": torch.randn(SIZE, SIZE), "scale": positive(SIZE, 1), "azp": azp, "q": ints(SIZE, SIZE)}


def _rows_to(dtype: torch.dtype, groups: int = 1, width: int = 1, **more: Any) -> Callable[[], Arguments]:
    def arguments() -> Arguments:
        x = torch.randn(SIZE, width * SIZE)
        return {"x": x, "q": ints(SIZE, SIZE).to(dtype), "scale": positive(SIZE, groups)} | {
            name: value() if callable(value) else value for name, value in more.items()
        }

    return arguments


def _fp8_call(granularity: str) -> Callable[..., Any]:
    def call(x: Tensor, q: Tensor, scale: Tensor, scale_ub: Tensor | None = None) -> Any:
        how: Any = {"granularity": granularity, "group_size": SIZE // 2}
        return epiloq.quantize_fp8(x, scale_ub=scale_ub, out=(q, scale), **how)

    return call


def _norm(x: Tensor, weight: Tensor, residual: Tensor, q: Tensor, scale: Tensor, residual_out: Tensor) -> Any:
    return epiloq.rms_norm_quant(x, weight, residual=residual, out=(q, scale, residual_out))


def _blockwise(x: Tensor, q: Tensor, scale: Tensor, offset: Tensor, total: Tensor) -> Any:
    return epiloq.quantize_blockwise_int8(x, SIZE // 2, out=(q, scale, offset, total))


_Q, _NONE = ("q", "scale"), ()
_PRODUCT = {"scale_a": _ROWS, "scale_b": _COLUMNS, "bias": _VECTOR}
_TWO: Shapes = ((SIZE, 2),)

OPERATIONS = (
    Operation("scaled_mm", epiloq.scaled_mm, _products, _PRODUCT),
    Operation("scaled_mm", epiloq.scaled_mm, lambda: _products(fp8), _PRODUCT),
    Operation("scaled_mm_azp", epiloq.scaled_mm_azp, _azp, _PRODUCT | {"azp_adj": _VECTOR, "azp": _ROWS}),
    Operation(
        "scaled_bmm",
        epiloq.scaled_bmm,
        _bmm,
        {"scale_a": ((2, SIZE, 1), (2, 1, 1)), "scale_b": ((2, 1, SIZE), (2, 1, 1)), "scale_out": _ONE},
    ),
    Operation(
        "groupwise_mm", epiloq.groupwise_mm, _groupwise, {"scale_a": _TWO, "scale_b": ((2, 1),), "bias": _VECTOR}
    ),
    Operation(
        "grouped_mm",
        epiloq.grouped_mm,
        _grouped,
        {"scale_a": _TWO, "scale_b": ((SIZE, 2, 1),), "offs": _VECTOR},
    ),
    Operation(
        "grouped_mm",
        epiloq.grouped_mm,
        _masked,
        {"scale_a": ((2, SIZE, 1),), "scale_b": ((2, 1, SIZE),), "masked_m": ((2,),)},
    ),
    Operation("weight_only_mm", epiloq.weight_only_mm, _few_bits, {"bias": _VECTOR}),
    Operation(
        "weight_only_mm",
        _few_bits_of,
        lambda: _few_bits() | {name: _few_bits()["weight"].state_dict()[name] for name in ("scale", "zero", "perm")},
        {"scale": ((1, 1, 16),), "zero": ((1, 1, 16),), "perm": _VECTOR},
    ),
    Operation("table_mm", epiloq.table_mm, _of_a_table, {"table": _VECTOR, "scale": _VECTOR, "bias": _VECTOR}),
    Operation("fp4_mm", epiloq.fp4_mm, _fp4, {"scale": ((SIZE, 1),), "bias": _VECTOR, "global_scale": _VECTOR}),
    Operation("fp8_weight_mm", epiloq.fp8_weight_mm, _of_float8, {"scale": _VECTOR, "bias": _VECTOR}),
    Operation("packed_fp4_mm", epiloq.packed_fp4_mm, _packed_fp4, {"bias": _VECTOR}),
    Operation("w4a8_mm", epiloq.w4a8_mm, _w4a8, {"scale_a": _ROWS, "bias": _VECTOR}),
    Operation(
        "w4a8_mm",
        _w4a8_of,
        lambda: _w4a8() | {name: _w4a8()["weight"].state_dict()[name] for name in ("scale", "zero", "perm")},
        {"scale": ((1, 1, 16),), "zero": ((1, 1, 16),), "perm": _VECTOR},
    ),
    Operation("grouped_packed_mm", epiloq.grouped_packed_mm, _grouped_packed, {"scale_a": ((SIZE, 1),)}),
    Operation("online_quant_mm", epiloq.online_quant_mm, _in_blocks, {"bias": _VECTOR}),
    Operation(
        "online_quant_weight",
        epiloq.online_quant_weight,
        _block_weight,
        {name: ((SIZE, 2), (SIZE, 1), (1, 2), (1, 1)) for name in ("w_scale", "w_offset")},
        _NONE,
    ),
    Operation("conv2d_int8", epiloq.conv2d_int8, _image, {"weight_scale": _VECTOR, "bias": _VECTOR}),
    Operation("requantized_mm", epiloq.requantized_mm, _requantized, {"weight_scale": _VECTOR, "bias": _VECTOR}, _NONE),
    Operation("conv2d_weight_only", epiloq.conv2d_weight_only, _image_of_few_bits, {"bias": _VECTOR}),
    Operation(
        "lookup_int8",
        epiloq.lookup_int8,
        lambda: {"x": ints(SIZE, SIZE), "table": ints(256), "out": ints(SIZE, SIZE)},
        {"table": ((256,),)},
    ),
    Operation(
        "quantize_int8",
        lambda x, q, scale, azp: epiloq.quantize_int8(x, scale=scale, azp=azp, out=(q, scale, azp)),
        _static,
        {"scale": _ROWS, "azp": _ROWS},
        ("q",),
    ),
    Operation(
        "quantize_int8",
        lambda x, q, scale, azp: epiloq.quantize_int8(x, symmetric=False, out=(q, scale, azp)),
        _static,
        {"scale": _ROWS, "azp": _ROWS},
        ("q", "scale", "azp"),
    ),
    Operation(
        "quantize_fp8",
        _fp8_call("token"),
        _rows_to(FP8, scale_ub=lambda: torch.ones(1)),
        {"scale": _ROWS, "scale_ub": _ONE},
        _Q,
    ),
    Operation("quantize_fp8", _fp8_call("group"), _rows_to(FP8, 2), {"scale": _TWO}, _Q),
    Operation(
        "quantize_fp8",
        lambda x, scale: epiloq.quantize_fp8(x, granularity="block", group_size=SIZE // 2, scale=scale),
        lambda: {"x": torch.randn(SIZE, SIZE), "scale": positive(2, 2)},
        {"scale": ((2, 2),)},
        _NONE,
    ),
    Operation(
        "quantize_blockwise_int8",
        _blockwise,
        _rows_to(
            torch.int8, 2, offset=lambda: positive(SIZE, 2), total=lambda: torch.zeros(SIZE, 2, dtype=torch.int32)
        ),
        {"scale": _TWO, "offset": _TWO, "total": _TWO},
        ("q", "scale", "offset", "total"),
    ),
    Operation(
        "rms_norm_quant",
        _norm,
        _rows_to(
            torch.int8,
            weight=lambda: torch.randn(SIZE),
            residual=lambda: torch.randn(SIZE, SIZE),
            residual_out=lambda: torch.zeros(SIZE, SIZE),
        ),
        {"scale": _ROWS, "weight": _VECTOR, "residual": ((SIZE, SIZE),), "residual_out": ((SIZE, SIZE),)},
        ("q", "scale", "residual_out"),
    ),
    Operation(
        "silu_and_mul_quant",
        lambda x, q, scale: epiloq.silu_and_mul_quant(x, out=(q, scale)),
        _rows_to(torch.int8, width=2),
        {"scale": _ROWS},
        _Q,
    ),
)


def named(operations: tuple[Operation, ...] = OPERATIONS) -> list[str]:
    """An id for each row of the table."""
    return [f"{index}-{operation.name}" for index, operation in enumerate(operations)]
