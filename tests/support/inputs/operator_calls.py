"""Every operator with each of its optional arguments, as ``torch.library.opcheck`` takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import blockwise_reference
import conv_reference
import epiloq
import fp4_reference
import weight_reference
from epiloq.ops.attention import decode_attention, rotate_and_store
from epiloq.ops.experts import rows, select_experts
from reference import make_problem

Calls = Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]
OPS = torch.ops.epiloq


def operator_calls(m: int, n: int, k: int, device: str) -> Calls:
    x, out = torch.randn(m, k, device=device), torch.zeros(m, n, dtype=torch.float16, device=device)
    yield from int8_products(m, n, k, device, out)
    yield from batched_products(m, n, k, device)
    yield from int8_quantisers(x)
    yield from fp8_quantisers(x)
    yield from fused_quantisers(x)
    yield from blockwise_quantisers(x)
    yield from blockwise_products(x.half(), n, out)
    yield from groupwise_products(x.to(torch.float8_e4m3fn), n, out)
    yield from weight_only_products(x.half(), n, out)
    yield from w4a8_products(x, n, out)
    yield from fp4_products(x, n)
    yield from convolutions(m, n, device)
    yield from decode_attentions(m, n, device)
    yield from rotations(m, device)
    yield from expert_routes(m, device)
    codes = torch.zeros(-(-n * k // 2), dtype=torch.uint8, device=device)
    numbers, scale = torch.randn(16, device=device), torch.rand(-(-n * k // 24), device=device)
    x = torch.randn(m, k, device=device)
    for bias in (None, torch.randn(n, device=device)):
        yield OPS.table_mm, (x, codes, numbers, scale, bias, n, 24), {}
        yield OPS.table_mm_out, (x, codes, numbers, scale, bias, n, 24), {"out": torch.zeros(m, n, device=device)}
    weight = torch.ones(n, k, device=device).to(torch.float8_e4m3fn)
    for bias, block in ((None, (1, -1)), (out.new_zeros(n), (8, 5))):
        rows, columns = (-(-n // block[0]), 1 if block[1] == -1 else -(-k // block[1]))
        arguments = (x.half(), weight, torch.ones(rows, columns, device=device), bias, *block)
        yield OPS.fp8_weight_mm, arguments, {}
        yield OPS.fp8_weight_mm_out, arguments, {"out": out}
    q, table = torch.zeros(m, k, dtype=torch.int8, device=device), torch.zeros(256, dtype=torch.int8, device=device)
    yield OPS.lookup_int8, (q, table), {}
    yield OPS.lookup_int8_out, (q, table), {"out": torch.zeros_like(q)}


def int8_products(m: int, n: int, k: int, device: str, out: Tensor) -> Calls:
    p = make_problem(m, n, k, bias=True, zero_point="token", dtype=torch.float16, device=device)
    plain, with_azp = (p.a, p.b, p.scale_a, p.scale_b), (p.a, p.b, p.scale_a, p.scale_b, p.azp_adj)
    for bias in (None, p.bias):
        yield OPS.scaled_mm, (*plain, bias), {"out_dtype": torch.float16}
        yield OPS.scaled_mm_out, (*plain, bias), {"out": out}
        yield OPS.scaled_mm_azp, (*with_azp, p.azp, bias), {"out_dtype": torch.float16}
        yield OPS.scaled_mm_azp_out, (*with_azp, None, bias), {"out": out}
        constant = {"constant_b": True, "out_dtype": torch.float16}
        yield OPS.scaled_mm, (*plain, bias), constant
        yield OPS.scaled_mm_azp, (*with_azp, p.azp, bias), constant


def batched_products(m: int, n: int, k: int, device: str) -> Calls:
    a, b = torch.ones(2, m, k, dtype=torch.int8, device=device), torch.ones(2, n, k, dtype=torch.int8, device=device).mT
    operands = (a, b, torch.ones(2, m, 1, device=device), torch.ones(1, device=device))
    scale_out = torch.full((1,), 3.0, device=device)
    yield OPS.scaled_bmm, (*operands, None), {"out_dtype": torch.float16}
    yield OPS.scaled_bmm, (*operands, scale_out), {"out_dtype": torch.int8}
    yield OPS.scaled_bmm_out, (*operands, scale_out), {"out": a.new_zeros(2, m, n)}


def int8_quantisers(x: Tensor) -> Calls:
    q, scale = torch.zeros_like(x, dtype=torch.int8), x.new_ones(x.shape[0], 1)
    azp = torch.zeros_like(scale, dtype=torch.int32)
    yield OPS.quantize_int8_symmetric, (x, 16), {}
    yield OPS.quantize_int8_asymmetric, (x.half(), 1, False), {}
    yield OPS.quantize_int8_static, (x, scale[:1], None, 1), {}
    yield OPS.quantize_int8_static, (x, scale, azp, 16), {}
    yield OPS.quantize_int8_out, (x, q, scale, azp, False, True), {}
    yield OPS.quantize_int8_out, (x, q, scale, None, True, True), {}


def fp8_quantisers(x: Tensor) -> Calls:
    e4m3, bound = torch.float8_e4m3fn, x.new_ones(1)
    for granularity, layout in (("tensor", "row"), ("token", "row"), ("group", "row"), ("group", "column")):
        yield OPS.quantize_fp8_dynamic, (x, granularity, 4, bound, 0.0, True, layout, e4m3, 16), {}
    yield OPS.quantize_fp8_dynamic, (x, "block", 4, None, 0.5, False, "row", torch.float8_e5m2, 1), {}
    yield OPS.quantize_fp8_static, (x, bound, "tensor", 128, e4m3, 16), {}
    scale = x.new_ones(x.shape[0], 1)
    yield OPS.quantize_fp8_out, (x, torch.zeros_like(x, dtype=e4m3), scale, "token", 1, bound, 0.0, False, False), {}


def fused_quantisers(x: Tensor) -> Calls:
    weight, pair = x.new_ones(x.shape[-1]), torch.cat([x, x], -1)
    for measure in (
        ("token", 128, False, "row", torch.int8, 16),
        ("group", 4, True, "column", torch.float8_e4m3fn, 1),
    ):
        yield OPS.rms_norm_quant, (x, weight, 1e-6, *measure), {}
        yield OPS.rms_norm_quant_add, (x, weight, 1e-6, x.flip(0), *measure), {}
        yield OPS.silu_and_mul_quant, (pair, *measure), {}
        yield OPS.silu_and_mul_quant, (pair, *measure, 1.702, 7.0, 1.0), {}
    into = (torch.zeros_like(x, dtype=torch.float8_e4m3fn), x.new_ones(x.shape[0], 1))
    yield OPS.rms_norm_quant_out, (x, weight, 1e-6, x.flip(0), *into, torch.zeros_like(x), "token", 128, False), {}
    yield OPS.silu_and_mul_quant_out, (pair, *into, "token", 128, False), {}
    yield OPS.silu_and_mul_quant_out, (pair, *into, "token", 128, False, 1.702, 7.0, 1.0), {}
    yield OPS.rms_norm, (x, weight, 1e-6), {}
    yield OPS.rms_norm, (x.half(), weight, 1e-6), {}
    yield OPS.rms_norm_add, (x, weight, 1e-6, x.flip(0)), {}
    yield OPS.rms_norm_out, (x, weight, 1e-6, None, torch.zeros_like(x), None), {}
    yield OPS.rms_norm_out, (x, weight, 1e-6, x.flip(0), torch.zeros_like(x), torch.zeros_like(x)), {}
    yield OPS.silu_and_mul, (pair,), {}
    yield OPS.silu_and_mul, (pair, 1.702, 7.0, 1.0, True), {}
    yield OPS.silu_and_mul_out, (pair,), {"out": torch.zeros_like(x)}
    yield OPS.silu_and_mul_out, (pair, 1.702, 7.0, 1.0, True), {"out": torch.zeros_like(x)}


def expert_routes(m: int, device: str) -> Calls:
    assert rows and select_experts  # whose import registers the operators
    logits, bias = torch.randn(m, 8, device=device), torch.randn(8, device=device)
    yield OPS.select_experts, (logits, 2, "softmax", None, True, 0.0, 1.0, 1, 1, 1, torch.float32), {}
    yield OPS.select_experts, (logits, 2, "sigmoid", bias, True, 1e-20, 2.5, 4, 2, 2, torch.float32), {}
    experts = torch.randint(8, (m, 2), device=device)
    yield OPS.sort_expert_rows, (experts, 8), {}
    x, measure = torch.randn(m, 32, device=device).half(), ("token", 128, "row", 16)
    yield OPS.gather_expert_rows, (x, experts, 8, torch.half, *measure), {}
    yield OPS.gather_expert_rows, (x, experts, 8, torch.int8, *measure), {}
    yield OPS.gather_expert_rows, (x, experts, 8, torch.float8_e4m3fn, "group", 32, "column", 16), {}
    places, weights = torch.randperm(2 * m, device=device), torch.rand(m, 2, device=device)
    for count in (None, torch.tensor([m], dtype=torch.int32, device=device)):
        yield OPS.combine_expert_rows, (torch.randn(2 * m, 24, device=device), places, weights, count), {}


def rotations(m: int, device: str) -> Calls:
    assert rotate_and_store  # whose import registers the operator
    heads, angles = torch.randn(2, m, 4, 10, device=device), torch.randn(2, 1, m, 10, device=device)
    norms = torch.rand(2, 10, device=device).unbind()
    for position in (None, torch.tensor(1, device=device)):
        caches = torch.zeros(2, 2, 1, m + 3, 10, device=device)
        yield OPS.rotate_and_store, (heads, 2, *angles, *caches.unbind(), position), {}
        yield OPS.rotate_and_store, (heads, 2, *angles, *caches.unbind(), position, *norms, 1e-6), {}
        scales = {name: caches[0, ..., 0].clone() for name in ("key_scale", "value_scale")}
        yield OPS.rotate_and_store, (heads, 2, *angles, *caches.to(torch.int8).unbind(), position), scales


def blockwise_quantisers(x: Tensor) -> Calls:
    yield OPS.quantize_blockwise_int8, (x, 8), {}
    yield OPS.quantize_blockwise_int8_symmetric, (x.half(), 32), {}
    q, scale = torch.zeros_like(x, dtype=torch.int8), x.new_ones(x.shape[0], -(-x.shape[1] // 8))
    total = torch.zeros_like(scale, dtype=torch.int32)
    yield OPS.quantize_blockwise_int8_out, (x, 8, q, scale, scale.clone(), total), {}


def blockwise_products(x: Tensor, n: int, out: Tensor) -> Calls:
    k = x.shape[1]
    for bits, bias in ((8, None), (4, x.new_ones(n))):
        weight = blockwise_reference.make_weight(n, k, 32, bits=bits, device=str(x.device)).prepared()
        arguments = (x, weight.values, weight.parameters, bias, k, 32, bits, 0.0, 6.0, bits == 4)
        yield OPS.online_quant_mm, arguments, {}
        yield OPS.online_quant_mm_out, arguments, {"out": out}


def groupwise_products(a: Tensor, n: int, out: Tensor) -> Calls:
    (m, k), experts = a.shape, 2
    weights = torch.ones(experts, n, k, device=a.device).to(a.dtype).transpose(1, 2)
    scale_a = torch.ones(m, -(-k // 128), device=a.device)
    scale_b = torch.ones(experts, -(-k // 128), -(-n // 128), device=a.device)
    for bias in (None, out.new_ones(n)):
        yield OPS.groupwise_mm, (a, weights[0], scale_a, scale_b[0], bias), {"out_dtype": torch.float16}
        yield OPS.groupwise_mm_out, (a, weights[0], scale_a, scale_b[0], bias, 1, 128, True), {"out": out}
    by_rows = (weights, scale_a, scale_b, torch.tensor([m // 2, m], dtype=torch.int32, device=a.device))
    yield OPS.grouped_mm, (a, *by_rows), {"out_dtype": torch.float16}
    yield OPS.grouped_mm_out, (a, *by_rows), {"out": out}
    counts = torch.full((experts,), m, dtype=torch.int32, device=a.device)
    by_mask = (weights, scale_a.expand(experts, -1, -1).contiguous(), scale_b, None, counts)
    yield OPS.grouped_mm, (torch.stack([a, a]), *by_mask), {"out_dtype": torch.bfloat16}
    rows, columns = torch.ones(m, 1, device=a.device), torch.ones(experts, 1, n, device=a.device)
    whole = (weights.to(torch.int8), rows, columns, by_rows[-1], None, 1, -1)
    yield OPS.grouped_mm, (a.to(torch.int8), *whole), {"out_dtype": torch.float16}


def weight_only_products(x: Tensor, n: int, out: Tensor) -> Calls:
    k, device = x.shape[1], str(x.device)
    for kind, bias in (("symmetric", None), ("zero", x.new_zeros(n)), ("offset", None)):
        w = weight_reference.make_weight(n, k, 4, 32, kind, act_order=bias is not None, device=device).packed
        tensors = (x, w.q, w.scale, w.zero, w.offset, w.perm, bias)
        yield OPS.weight_only_mm, (*tensors, 4, n, k, 32, 0.0, 6.0), {}
        yield OPS.weight_only_mm_out, (*tensors, 4, n, k, 32, None, None), {"out": out}
        yield OPS.dequantize_weight, (w.q, w.scale, w.zero, w.offset, 4, n, k, 32, torch.bfloat16), {}


def w4a8_products(x: Tensor, n: int, out: Tensor) -> Calls:
    (m, k), device = x.shape, str(x.device)
    scale = torch.ones(m, 1, device=device)
    for kind, dtype, bias in (("symmetric", torch.float8_e4m3fn, None), ("zero", torch.int8, out.new_zeros(n))):
        w = weight_reference.make_weight(n, k, 4, 32, kind, act_order=bias is not None, device=device).packed
        tensors = ((10 * x).clamp(-100, 100).to(dtype), w.q, w.scale, w.zero, w.perm, scale, bias)
        yield OPS.w4a8_mm, (*tensors, n, k, 32), {"out_dtype": torch.bfloat16 if bias is None else torch.float16}
        yield OPS.w4a8_mm_out, (*tensors, n, k, 32), {"out": out}
    yield from grouped_packed_products(x, device)


def fp4_products(x: Tensor, n: int) -> Calls:
    m, k = x.shape
    for dtype, whole in ((torch.uint8, "none"), (torch.float8_e4m3fn, "rows")):
        weight = fp4_reference.weight(n, k, dtype, str(x.device), whole)
        for bias in (None, x.new_zeros(n)):
            yield OPS.fp4_mm, (x.clone().requires_grad_(), *weight, bias), {}
            yield OPS.fp4_mm_out, (x, *weight, bias), {"out": x.new_zeros(m, n)}
        yield OPS.fp4_dequantize, (*weight, k, torch.bfloat16), {}
        w = epiloq.pack_fp4_weight(*weight[:2], in_features=k, global_scale=None if whole == "none" else x.new_ones(1))
        tensors = ((10 * x).to(torch.float8_e4m3fn), w.q, w.scale, None, None, x.new_ones(m, 1), None)
        numbers = (n, k, w.group_size, w.format, w.global_scale)
        yield OPS.w4a8_mm, (*tensors, *numbers), {"out_dtype": torch.bfloat16}
        yield OPS.w4a8_mm_out, (*tensors, *numbers), {"out": x.new_zeros(m, n).bfloat16()}
        parts, numbers = (w.q, w.scale, w.global_scale), (w.format, n, k)
        yield OPS.packed_fp4_mm, (x.clone().requires_grad_(), *parts, x.new_zeros(n), None, None, *numbers), {}
        yield OPS.packed_fp4_mm_out, (x, *parts, None, None, None, *numbers), {"out": x.new_zeros(m, n)}
        yield OPS.dequantize_packed_fp4, (*parts, *numbers, torch.float16), {}


def grouped_packed_products(x: Tensor, device: str) -> Calls:
    (m, k), experts = x.shape, 2
    ends, counts = (torch.tensor(c, dtype=torch.int32, device=device) for c in ([m // 2, m], [m, 0]))
    w = weight_reference.make_weight(experts * 16, k, 4, 32, "zero", device=device).packed
    parts, numbers = (w.q, w.scale, w.zero, None), (4, experts * 16, k, 32)
    yield OPS.grouped_packed_mm, (x.half(), *parts, None, ends, None, *numbers), {"out_dtype": torch.float16}
    scale = torch.ones(experts, m, 1, device=device)
    boxes = torch.stack([x, x]).to(torch.float8_e4m3fn)
    out = torch.zeros(experts, m, 16, device=device, dtype=torch.bfloat16)
    yield OPS.grouped_packed_mm_out, (boxes, *parts, scale, None, counts, *numbers), {"out": out}


def decode_attentions(batch: int, tokens: int, device: str) -> Calls:
    assert decode_attention  # whose import registers the operators
    query = torch.randn(batch, 4, 64, device=device, dtype=torch.bfloat16)
    cached = torch.randn(2, batch, 2, tokens, 64, device=device, dtype=torch.bfloat16)
    quantised = cached.clamp(-1, 1).mul(100).to(torch.int8)
    scale = torch.rand(2, batch, 2, tokens, device=device, dtype=torch.bfloat16)
    mask = torch.ones(batch, tokens, device=device, dtype=torch.bool)
    for arguments in ((*cached, None, None, None), (*cached, mask, None, None), (*quantised, mask, *scale)):
        yield OPS.decode_attention, (query, *arguments, 0.125), {}
        yield OPS.decode_attention_out, (query, *arguments, 0.125), {"out": torch.zeros_like(query)}
        yield OPS.decode_attention, (query, *arguments, 0.125, query.new_zeros(4)), {}


def convolutions(batch: int, n: int, device: str) -> Calls:
    p = conv_reference.int8_problem((batch, 4, 5, 3), n, (2, 3), device=device)
    where, bias = ([1, 2], [0, 1, 1, 0], [1, 1], 1), torch.zeros(n, device=device)
    size = (batch, 4, 2, n)
    for offset, dtype in ((None, torch.float16), (bias, torch.int8)):
        correction = None if offset is None else p.weight.sum((1, 2, 3), dtype=torch.int32)
        zero = 0 if offset is None else 3
        image = p.x.permute(0, 3, 1, 2)
        arguments = (image, p.weight, p.weight_scale, offset, correction, zero, -zero, None, 6.0, *where)
        yield OPS.conv2d_int8, arguments, {"out_dtype": dtype}
        yield OPS.conv2d_int8_out, arguments, {"out": torch.zeros(size, dtype=dtype, device=device).permute(0, 3, 1, 2)}
    x = torch.randn(batch, 3, 4, 5, device=device)
    for zeros, offset in (("none", None), ("zero", bias), ("offset", None)):
        w = conv_reference.packed(n, (2, 3), 3, 4, 32, zeros, device=device).packed
        numbers = (4, n, [2, 3], 3, w.padded_channels, w.group_size, 0.0, 6.0)
        arguments = (x, w.q, w.scale, w.zero, w.offset, offset, *numbers, *where)
        yield OPS.conv2d_weight_only, arguments, {}
        yield OPS.conv2d_weight_only_out, arguments, {"out": torch.zeros(size, device=device).permute(0, 3, 1, 2)}
