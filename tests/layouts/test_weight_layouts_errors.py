"""Tensors that do not make a weight, and weights that a layout cannot represent: errors that name what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epiloq
from epiloq.formats.layouts import awq, compressed_tensors, gptq, marlin
from epiloq.formats.layouts.base import FormatError
from layout_inputs import awq_tensors, scales, words


def gptq_call(**changes: Any) -> Any:
    valid = {"qweight": words(16, 64), "qzeros": words(4, 8), "scales": scales(4, 64)}
    valid |= {"g_idx": (torch.arange(128) // 32).to(torch.int32)}
    return lambda: gptq.to_packed(**{**valid, "group_size": 32, **changes})


def awq_call(version: str = "gemm", **changes: Any) -> Any:
    valid = awq_tensors(version, 16, 128, 32, torch.float16)
    return lambda: awq.to_packed(**{**valid, "group_size": 32, "version": version, **changes})


def marlin_call(**changes: Any) -> Any:
    valid = {"B": words(8, 128), "s": scales(4, 64), "qzeros": words(4, 8)}
    return lambda: marlin.to_packed(**{**valid, "group_size": 32, **changes})


def compressed_call(**changes: Any) -> Any:
    valid = {"weight_packed": words(16, 16), "weight_scale": scales(16, 4), "weight_shape": torch.tensor([16, 128])}
    valid |= {"weight_zero_point": words(2, 4)}
    return lambda: compressed_tensors.to_packed(**{**valid, "group_size": 32, **changes})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (gptq_call(qweight=words(15, 64)), "(qzeros|scales|g_idx): expected"),
        (gptq_call(qweight=words(16, 64), shape=(64, 256)), "shape: expected tensors of a layer"),
        (gptq_call(qweight=words(16, 63)), "out_features: expected a multiple of 8"),
        (gptq_call(qweight=words(16, 64).long()), "qweight: expected torch.int32"),
        (gptq_call(qweight=words(16)), "qweight: expected 2 dimensions"),
        (gptq_call(qzeros=words(4, 7)), r"qzeros: expected torch.int32 \[4, 8\]"),
        (gptq_call(qzeros=words(4, 8).to("meta")), "qzeros: expected a tensor on cpu"),
        (gptq_call(scales=words(4, 64)), "scales: expected floating point"),
        (gptq_call(scales=scales(4, 64).double()), "scale: expected float16"),
        (gptq_call(g_idx=torch.zeros(128, dtype=torch.int32)), "g_idx: expected 32 channels in each group"),
        (gptq_call(g_idx=torch.arange(128)), "g_idx: expected torch.int32"),
        (gptq_call(group_size=48), "(qzeros|scales): expected"),
        (gptq_call(group_size=0), "group_size: expected -1 or at least 1"),
        (gptq_call(bits=5), "bits: expected one of"),
        (gptq_call(checkpoint_format="marlin"), "checkpoint_format: expected one of"),
        (gptq_call(bits=8, qzeros=words(4, 16) | -1, qweight=words(32, 64)), "zero: expected values from 0 to 255"),
        (awq_call(qweight=words(127, 2)), "in_features: expected a multiple of 32"),
        (awq_call(qweight=words(160, 2)), "qzeros: expected"),
        (awq_call(qzeros=words(4, 3)), "qzeros: expected"),
        (awq_call(scales=scales(5, 16)), "scales: expected"),
        (awq_call(group_size=-2), "group_size: expected"),
        (awq_call(shape=(16, 64)), "shape: expected"),
        (awq_call(version="gemv2"), "version: expected one of gemm, gemv, gemv_fast"),
        (awq_call("gemv", group_size=16), "group_size: expected 32, 64, or at least 128"),
        (awq_call("gemv", scales=scales(16, 4)), "scales: expected"),
        (awq_call("gemv_fast", qweight=words(4, 96)), "in_features: expected a multiple of 64"),
        (awq_call("gemv_fast", qzeros=scales(32, 16).float()), "offset: expected the scale's"),
        (marlin_call(B=words(8, 127)), "out_features: expected a multiple of 64"),
        (marlin_call(B=words(9, 128)), "in_features: expected a multiple of 32"),
        (marlin_call(s=scales(3, 64)), "s: expected"),
        (marlin_call(qzeros=words(4, 9)), "qzeros: expected"),
        (marlin_call(group_size=48), "group_size: expected one of"),
        (marlin_call(bits=3), "bits: expected 4 or 8"),
        (marlin_call(g_idx_sort_indices=torch.zeros(128, dtype=torch.int32)), "g_idx_sort_indices: expected a permut"),
        (marlin_call(g_idx_sort_indices=torch.arange(127).int()), "g_idx_sort_indices: expected"),
        (compressed_call(weight_packed=words(16, 15)), "weight_packed: expected"),
        (compressed_call(weight_packed=None), "weight_packed: expected it or weight, got neither"),
        (compressed_call(weight=torch.zeros(2, 2)), "weight_packed: expected it or weight, got both"),
        (compressed_call(weight_shape=torch.tensor([16, 160])), "weight_packed: expected"),
        (compressed_call(weight_shape=torch.tensor([16, 128, 1])), "weight_shape: expected"),
        (compressed_call(weight_scale=scales(16, 1)), "weight_scale: expected"),
        (compressed_call(weight_zero_point=words(4, 2)), "weight_zero_point: expected"),
        (compressed_call(group_size=48), "in_features: expected a multiple of 48"),
        (compressed_call(bits=6), "bits: expected one of"),
        (compressed_call(weight_g_idx=torch.zeros(128, dtype=torch.int32)), "weight_g_idx: expected 32 channels"),
    ],
)
def test_mismatching_tensors_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_layouts_refuse_unsupported_weights(seed: int) -> None:
    q, one = torch.randint(0, 16, (64, 128)), scales(64, 4)
    offsets = epiloq.pack_weight(q, one, offset=one, bits=4, group_size=32)
    sixteen = epiloq.pack_weight(q, one, torch.full((64, 4), 16), bits=4, group_size=32)
    nought = epiloq.pack_weight(q, one, torch.zeros(64, 4, dtype=torch.int32), bits=4, group_size=32)
    ordered = epiloq.pack_weight(q - 8, one, bits=4, group_size=32, perm=torch.randperm(128))
    ragged = epiloq.pack_weight(q - 8, scales(64, 3), bits=4, group_size=48)
    for write in (gptq.from_packed, awq.from_packed, compressed_tensors.from_packed, marlin.from_packed):
        with pytest.raises(FormatError, match="expected integer zero points or none, got real offsets"):
            write(offsets)
    for write in (awq.from_packed, compressed_tensors.from_packed, marlin.from_packed):
        with pytest.raises(ValueError, match="below 16"):
            write(sixteen)
        with pytest.raises(FormatError, match=r"(in_features|group_size): expected"):
            write(ragged)
    with pytest.raises(FormatError, match="needs the version gptq_v2"):
        gptq.from_packed(nought)
    with pytest.raises(FormatError, match="in the order of the channels"):
        awq.from_packed(ordered)
    with pytest.raises(FormatError, match="int-quantized: expected 8 bits"):
        compressed_tensors.from_packed(nought, layout="int-quantized")
    assert torch.equal(gptq.to_packed(**gptq.from_packed(ragged), group_size=48).dequantize(), ragged.dequantize())
