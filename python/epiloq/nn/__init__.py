"""Modules with quantised weights."""

from __future__ import annotations

from epiloq.nn.convolutions.int8_conv2d import Int8Conv2d
from epiloq.nn.convolutions.weight_only_conv2d import WeightOnlyConv2d
from epiloq.nn.experts.expert_linears import ExpertLinears
from epiloq.nn.experts.fp4_experts import Fp4Experts
from epiloq.nn.experts.fp8_block_experts import Fp8BlockExperts
from epiloq.nn.experts.gated_experts import GatedExperts
from epiloq.nn.experts.packed_experts import PackedExperts, W4A8Experts
from epiloq.nn.experts.packed_fp4_experts import PackedFp4Experts, W4A8Fp4Experts
from epiloq.nn.experts.row_experts import Fp8Experts, Int8Experts
from epiloq.nn.fp4_linear import Fp4Linear
from epiloq.nn.fp8_block_linear import Fp8BlockLinear
from epiloq.nn.fp8_linear import Fp8Linear
from epiloq.nn.fp8_weight_only_linear import Fp8WeightOnlyLinear
from epiloq.nn.int8_linear import Int8Linear
from epiloq.nn.int8_table import Int8Quantize, Int8Table
from epiloq.nn.online_quant_linear import OnlineQuantLinear
from epiloq.nn.quantized_embedding import QuantizedEmbedding
from epiloq.nn.table_linear import TableLinear
from epiloq.nn.w4a8_fp4_linear import W4A8Fp4Linear
from epiloq.nn.w4a8_linear import W4A8Linear
from epiloq.nn.weight_only_linear import WeightOnlyLinear

__all__ = [
    "ExpertLinears",
    "Fp4Experts",
    "Fp4Linear",
    "Fp8BlockExperts",
    "Fp8BlockLinear",
    "Fp8Experts",
    "Fp8Linear",
    "Fp8WeightOnlyLinear",
    "GatedExperts",
    "Int8Conv2d",
    "Int8Experts",
    "Int8Linear",
    "Int8Quantize",
    "Int8Table",
    "OnlineQuantLinear",
    "PackedExperts",
    "PackedFp4Experts",
    "QuantizedEmbedding",
    "TableLinear",
    "W4A8Experts",
    "W4A8Fp4Experts",
    "W4A8Fp4Linear",
    "W4A8Linear",
    "WeightOnlyConv2d",
    "WeightOnlyLinear",
]
