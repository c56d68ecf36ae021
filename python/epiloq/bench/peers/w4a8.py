"""Other projects' products of FP8 activations with 4-bit weights, on the same weights as epiloq."""

from __future__ import annotations

from functools import partial

import torch

import epiloq
from epiloq.bench.contract import Call, Inputs, require
from epiloq.bench.peers.weight_only import int4_words, on_cuda


def cutlass_w4a8(inputs: Inputs, weight: epiloq.PackedWeight) -> Call:
    """vLLM's CUTLASS kernel, called as by its ``CutlassW4A8LinearKernel``: group scales in FP8 times a scale per
    channel."""
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
