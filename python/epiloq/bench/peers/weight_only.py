"""Other projects' products of 16-bit or FP8 activations with low-bit weights, on the same weights as epiloq."""

from __future__ import annotations

import json
from functools import partial

import torch
from torch import Tensor, nn

import epiloq
from epiloq.bench.contract import Call, Inputs, Unavailable, require
from epiloq.formats.layouts import marlin as layout


def _codes(weight: epiloq.PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (uint8, 0 to 2^bits - 1), scales, and zero points in the scales' dtype, all [N, ...]."""
    q, scale, zero = weight.unpack()
    middle = 1 << (weight.bits - 1)
    if zero is None:
        return (q.to(torch.int16) + middle).to(torch.uint8), scale, torch.full_like(scale, middle)
    return q, scale, zero.to(scale.dtype)


def on_cuda(x: Tensor) -> None:
    if not x.is_cuda:
        raise Unavailable("CUDA only")


def int4_words(q: Tensor) -> Tensor:
    """Integers ``[N, K]``, of which 4 bits count, as vLLM's CUTLASS kernels take them: int32 ``[K / 8, N]``,
    column-major, the first of eight in the lowest bits."""
    nibbles = q.to(torch.int32).view(q.shape[0], -1, 8) & 15
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=q.device)
    return (nibbles << shifts).sum(-1, dtype=torch.int32).t()


def int4pack(inputs: Inputs, weight: epiloq.PackedWeight) -> Call:
    """torch's int4 product, also used by torchao's "tile_packed_to_4d" layout: ``scale * (q - 8) + offset``."""
    x = inputs["x"]
    if weight.bits != 4 or (x.is_cuda and x.dtype != torch.bfloat16):
        raise Unavailable("torch's int4 product supports 4 bits, on CUDA with bfloat16")
    q, scale, zero = _codes(weight)
    parameters = torch.stack((scale.t(), ((8 - zero) * scale).t()), dim=-1).contiguous()
    if not x.is_cuda:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        return partial(torch.ops.aten._weight_int4pack_mm_for_cpu, x, packed, weight.group_size, parameters)
    packed = torch.ops.aten._convert_weight_to_int4pack(q[:, ::2] << 4 | q[:, 1::2], 8)
    return partial(torch.ops.aten._weight_int4pack_mm, x, packed, weight.group_size, parameters)


def marlin(inputs: Inputs, weight: epiloq.PackedWeight) -> Call:
    """vLLM's Marlin kernel, called as by ``apply_gptq_marlin_linear``."""
    x = inputs["x"]
    on_cuda(x)
    ops, types = require("vllm._custom_ops"), require("vllm.scalar_type").scalar_types
    utils = require("vllm.model_executor.layers.quantization.utils.marlin_utils")
    tensors = layout.from_packed(weight)
    kinds = {(4, True): types.uint4b8, (8, True): types.uint8b128, (4, False): types.uint4, (8, False): types.uint8}
    return partial(
        ops.marlin_gemm,
        x,
        None,
        tensors["B"],
        None,
        tensors["s"],
        None,
        None,
        tensors.get("qzeros"),
        None,
        None,
        utils.marlin_make_workspace_new(x.device),
        kinds[weight.bits, weight.symmetric],
        size_m=x.shape[0],
        size_n=weight.n,
        size_k=weight.k,
        use_fp32_reduce=True,
    )


def machete(inputs: Inputs, weight: epiloq.PackedWeight) -> Call:
    """vLLM's Machete, called as by its ``MacheteLinearKernel``."""
    x, group = inputs["x"], weight.group_size
    on_cuda(x)
    if weight.bits != 4 or group not in (-1, 128) or weight.n % 128 or weight.k % 64:
        raise Unavailable("Machete supports 4 bits in groups of 128 or whole rows, N in 128s and K in 64s")
    ops, types = require("vllm._custom_ops"), require("vllm.scalar_type").scalar_types
    q, scale, zero = _codes(weight)
    kind = types.uint4b8 if weight.symmetric else types.uint4
    words = ops.machete_prepack_B(int4_words(q), a_type=x.dtype, b_type=kind, group_scales_type=x.dtype)
    return partial(
        ops.machete_mm,
        a=x,
        b_q=words,
        b_type=kind,
        b_group_scales=scale.t().contiguous(),
        b_group_zeros=None if weight.symmetric else (-scale * zero).t().contiguous(),
        b_group_size=group,
    )


def gemlite(inputs: Inputs, weight: epiloq.PackedWeight) -> Call:
    """GemLite's Triton kernels."""
    x = inputs["x"]
    on_cuda(x)
    core = require("gemlite.core")
    kind = {torch.float16: core.DType.FP16, torch.bfloat16: core.DType.BF16}[x.dtype]
    layer = core.GemLiteLinearTriton(
        W_nbits=weight.bits,
        group_size=weight.k if weight.group_size == -1 else weight.group_size,
        in_features=weight.k,
        out_features=weight.n,
        input_dtype=kind,
        output_dtype=kind,
    )
    q, scale, zero = _codes(weight)
    layer.pack(q, scale.view(-1, 1), zero.view(-1, 1), bias=None)
    return partial(layer.forward, x)


def humming(inputs: Inputs, weight: epiloq.PackedWeight) -> Call:
    """humming's kernel that its tables choose for this M, compiled here."""
    x = inputs["x"]
    on_cuda(x)
    layers, ops, tune = (require(f"humming.{name}") for name in ("layer", "ops", "tune"))
    group = max(weight.group_size, 0)  # humming's 0 means one group per row
    if group and weight.k % group:
        raise Unavailable("humming supports only K divisible by the group size")
    config = {"dtype": f"uint{weight.bits}", "group_size": group, "has_zero_point": not weight.symmetric}
    layer = layers.HummingLayer(weight.n, weight.k, config, torch_dtype=x.dtype).to(x.device)
    q, scale, zero = _codes(weight)
    tensors = {"weight": ops.pack_weight(q.int(), weight.bits), "weight_scale": scale}
    if not weight.symmetric:
        tensors["zero_point"] = ops.pack_weight(zero.t().int().contiguous(), weight.bits).t()
    layer.load_from_tensors(tensors)
    layer.transform()
    tuning = json.dumps(tune.get_heuristics_config(layer.humming_config, shape_m=x.shape[0]))
    call = partial(layer.forward, x, tuning_config=tuning)
    call()
    return call


def torchao(inputs: Inputs, weight: epiloq.PackedWeight) -> Call:
    """torchao's "plain" int4 layout, whose kernels are for Hopper; it requantises the weight to its own grid."""
    x = inputs["x"]
    on_cuda(x)
    if weight.bits != 4 or x.dtype != torch.bfloat16 or weight.group_size == -1:
        raise Unavailable("torchao's int4 layout supports groups of 4 bits and bfloat16")
    quantization = require("torchao.quantization")
    with torch.device("meta"):
        linear = nn.Linear(weight.k, weight.n, bias=False, dtype=x.dtype)
    linear.weight = nn.Parameter(weight.dequantize(x.dtype), requires_grad=False)
    config = quantization.Int4WeightOnlyConfig(group_size=weight.group_size, int4_packing_format="plain")
    model = nn.Sequential(linear)
    quantization.quantize_(model, config)
    return partial(model.forward, x)


def cutlass_w4a8(inputs: Inputs, weight: epiloq.PackedWeight) -> Call:
    """vLLM's CUTLASS kernel, called as ``CutlassW4A8LinearKernel`` does: FP8 group scales times a channel scale."""
    on_cuda(inputs["x_q"])
    ops = require("vllm._custom_ops")
    q, scale, zero = weight.unpack()
    assert zero is None
    largest = scale.float().amax(1, keepdim=True)
    channel = torch.exp2(torch.floor(torch.log2(largest)) - 1)  # so that group scales are normal numbers of E4M3
    groups = (scale.float() / channel).to(torch.float8_e4m3fn)
    words = int4_words(q)
    return partial(
        ops.cutlass_w4a8_mm,
        a=inputs["x_q"],
        b_q=ops.cutlass_encode_and_reorder_int4b(words),
        b_group_scales=ops.cutlass_pack_scale_fp8(groups.t().contiguous()),
        b_group_size=weight.group_size,
        a_token_scales=inputs["scale_a"],
        b_channel_scales=channel.flatten(),
    )
