"""Valid arguments of every operation, for `every_operation`, and calls of those whose arguments are in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import epiloq

Arguments = dict[str, Any]

# One size for rows, columns and depth: what has the right number of elements by accident broadcasts by accident.
SIZE = 16
FP8 = torch.float8_e4m3fn


def ints(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(-100, 100, shape).to(dtype)


def fp8(*shape: int) -> Tensor:
    return torch.randn(*shape).to(FP8)


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape) * 0.02 + 1e-3


def products(make: Callable[..., Tensor] = ints) -> Arguments:
    return {
        "a": make(SIZE, SIZE),
        "b": make(SIZE, SIZE).t(),
        "scale_a": positive(SIZE, 1),
        "scale_b": positive(SIZE),
        "bias": torch.randn(SIZE).bfloat16(),
        "out": torch.full((SIZE, SIZE), 7.0).bfloat16(),
    }


def azp() -> Arguments:
    return products() | {"azp_adj": ints(SIZE, dtype=torch.int32), "azp": ints(SIZE, 1, dtype=torch.int32)}


def bmm() -> Arguments:
    return {
        "a": ints(2, SIZE, SIZE),
        "b": ints(2, SIZE, SIZE).mT,
        "scale_a": positive(2, SIZE, 1),
        "scale_b": positive(2, 1, SIZE),
        "scale_out": positive(1),
        "out": ints(2, SIZE, SIZE),
    }


def groupwise() -> Arguments:
    k = 256
    return {
        "a": fp8(SIZE, k),
        "b": fp8(SIZE, k).t(),
        "scale_a": positive(SIZE, 2),
        "scale_b": positive(2, -(-SIZE // 128)),
        "bias": torch.randn(SIZE).bfloat16(),
        "out": torch.full((SIZE, SIZE), 7.0).bfloat16(),
    }


def grouped() -> Arguments:
    k, experts = 256, SIZE
    return {
        "a": fp8(SIZE, k),
        "b": fp8(experts, SIZE, k).mT,
        "scale_a": positive(SIZE, 2),
        "scale_b": positive(experts, 2, -(-SIZE // 128)),
        "offs": torch.arange(1, experts + 1, dtype=torch.int32),
        "out": torch.full((SIZE, SIZE), 7.0).bfloat16(),
    }


def masked() -> Arguments:
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


def packed() -> Arguments:
    zero = torch.randint(0, 16, (SIZE, 1), dtype=torch.uint8)
    weight = epiloq.pack_weight(
        torch.randint(0, 16, (SIZE, SIZE)), positive(SIZE, 1), zero, bits=4, group_size=-1, perm=torch.randperm(SIZE)
    )
    out = torch.full((SIZE, SIZE), 7.0)
    return {"x": torch.randn(SIZE, SIZE), "weight": weight, "bias": torch.randn(SIZE), "out": out}


def packed_by_parts(x: Tensor, weight: Any, bias: Tensor, out: Tensor, **parts: Tensor) -> Tensor:
    tensors = weight.state_dict() | parts
    numbers = {name: getattr(weight, name) for name in ("bits", "n", "k", "group_size")}
    whole = epiloq.PackedWeight(**{"zero": None, "offset": None, "perm": None} | tensors, **numbers)
    return epiloq.weight_only_mm(x, whole, bias, out=out)


def fp8_weight() -> Arguments:
    return {
        "x": torch.randn(SIZE, SIZE),
        "weight": fp8(SIZE, SIZE),
        "scale": positive(SIZE, 1),
        "bias": torch.randn(SIZE),
        "out": torch.full((SIZE, SIZE), 7.0),
    }


def table() -> Arguments:
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


def fp4() -> Arguments:
    return {
        "x": torch.randn(SIZE, SIZE),
        "codes": torch.randint(0, 256, (SIZE, SIZE // 2), dtype=torch.uint8),
        "scale": torch.randint(110, 130, (SIZE, -(-SIZE // 32)), dtype=torch.uint8),
        "bias": torch.randn(SIZE),
        "global_scale": positive(SIZE),
        "out": torch.full((SIZE, SIZE), 7.0),
    }


def packed_fp4() -> Arguments:
    codes = torch.randint(0, 256, (SIZE, SIZE // 2), dtype=torch.uint8)
    scale = torch.randint(110, 130, (SIZE, -(-SIZE // 32)), dtype=torch.uint8)
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=SIZE, global_scale=positive(1))
    out = torch.full((SIZE, SIZE), 7.0)
    return {"x": torch.randn(SIZE, SIZE), "weight": weight, "bias": torch.randn(SIZE), "out": out}


def w4a8() -> Arguments:
    weight, out = packed()["weight"], torch.full((SIZE, SIZE), 7.0).bfloat16()
    bias = torch.randn(SIZE).bfloat16()
    return {"x_q": fp8(SIZE, SIZE), "weight": weight, "scale_a": positive(SIZE, 1), "bias": bias, "out": out}


def w4a8_by_parts(x_q: Tensor, weight: Any, scale_a: Tensor, bias: Tensor, out: Tensor, **parts: Tensor) -> Tensor:
    numbers = {name: getattr(weight, name) for name in ("bits", "n", "k", "group_size")}
    whole = epiloq.PackedWeight(**{"offset": None} | weight.state_dict() | parts, **numbers)
    return epiloq.w4a8_mm(x_q, whole, scale_a, bias, out=out)


def grouped_packed() -> Arguments:
    weight = epiloq.pack_weight(ints(2 * SIZE, SIZE) % 8, positive(2 * SIZE, 1), bits=4, group_size=-1)
    return {
        "x": fp8(SIZE, SIZE),
        "weight": weight,
        "scale_a": positive(SIZE, 1),
        "offs": torch.tensor([5, SIZE], dtype=torch.int32),
        "out": torch.full((SIZE, SIZE), 7.0).bfloat16(),
    }


def blockwise() -> Arguments:
    weight = epiloq.online_quant_weight(ints(SIZE, SIZE), positive(SIZE, 2), positive(SIZE, 2), group_size=SIZE // 2)
    out = torch.full((SIZE, SIZE), 7.0)
    return {"x": torch.randn(SIZE, SIZE), "w_q": weight, "bias": torch.randn(SIZE), "out": out}


def block_weight() -> Arguments:
    return {
        "w_q": ints(SIZE, SIZE),
        "w_scale": positive(SIZE, 2),
        "w_offset": positive(SIZE, 2),
        "group_size": SIZE // 2,
    }


def image() -> Arguments:
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


def requantized() -> Arguments:
    return image() | {name: ints(SIZE, SIZE) for name in ("x_q", "weight", "out")}


def packed_image() -> Arguments:
    return {
        "x": torch.randn(2, SIZE, 4, 4).contiguous(memory_format=torch.channels_last),
        "weight": epiloq.pack_conv2d_weight(ints(SIZE, 3, 3, SIZE) % 8, positive(SIZE), bits=4, group_size=-1),
        "bias": torch.randn(SIZE),
        "padding": 1,
        "out": torch.full((2, SIZE, 4, 4), 7.0).contiguous(memory_format=torch.channels_last),
    }


def static() -> Arguments:
    azp = ints(SIZE, 1, dtype=torch.int32)
    return {"x": torch.randn(SIZE, SIZE), "scale": positive(SIZE, 1), "azp": azp, "q": ints(SIZE, SIZE)}


def rows_to(dtype: torch.dtype, groups: int = 1, width: int = 1) -> Callable[[], Arguments]:
    def arguments() -> Arguments:
        x = torch.randn(SIZE, width * SIZE)
        return {"x": x, "q": ints(SIZE, SIZE).to(dtype), "scale": positive(SIZE, groups)}

    return arguments


def fp8_call(granularity: str) -> Callable[..., Any]:
    def call(x: Tensor, q: Tensor, scale: Tensor, scale_ub: Tensor | None = None) -> Any:
        how: Any = {"granularity": granularity, "group_size": SIZE // 2}
        return epiloq.quantize_fp8(x, scale_ub=scale_ub, out=(q, scale), **how)

    return call


def fp8_by_blocks(x: Tensor, scale: Tensor) -> Any:
    return epiloq.quantize_fp8(x, granularity="block", group_size=SIZE // 2, scale=scale)


def norm(x: Tensor, weight: Tensor, residual: Tensor, q: Tensor, scale: Tensor, residual_out: Tensor) -> Any:
    return epiloq.rms_norm_quant(x, weight, residual=residual, out=(q, scale, residual_out))


def quantize_blockwise(x: Tensor, q: Tensor, scale: Tensor, offset: Tensor, total: Tensor) -> Any:
    return epiloq.quantize_blockwise_int8(x, SIZE // 2, out=(q, scale, offset, total))


def _parts(arguments: Arguments) -> Arguments:
    return arguments | {name: arguments["weight"].state_dict()[name] for name in ("scale", "zero", "perm")}


def packed_parts() -> Arguments:
    return _parts(packed())


def w4a8_parts() -> Arguments:
    return _parts(w4a8())


def lookup() -> Arguments:
    return {"x": ints(SIZE, SIZE), "table": ints(256), "out": ints(SIZE, SIZE)}


def fp8_blocks() -> Arguments:
    return {"x": torch.randn(SIZE, SIZE), "scale": positive(2, 2)}


def int8_blocks() -> Arguments:
    total = torch.zeros(SIZE, 2, dtype=torch.int32)
    return rows_to(torch.int8, 2)() | {"offset": positive(SIZE, 2), "total": total}


def _norm_inputs() -> Arguments:
    return {"weight": torch.randn(SIZE), "residual": torch.randn(SIZE, SIZE), "residual_out": torch.zeros(SIZE, SIZE)}


def norm_rows() -> Arguments:
    return rows_to(torch.int8)() | _norm_inputs()


def plain_norm_rows() -> Arguments:
    return _norm_inputs() | {"x": torch.randn(SIZE, SIZE), "out": torch.zeros(SIZE, SIZE)}


def gated_rows() -> Arguments:
    return {"x": torch.randn(SIZE, 2 * SIZE), "out": torch.zeros(SIZE, SIZE)}


def bounded_rows() -> Arguments:
    return rows_to(FP8)() | {"scale_ub": torch.ones(1)}


def fp8_products() -> Arguments:
    return products(fp8)
