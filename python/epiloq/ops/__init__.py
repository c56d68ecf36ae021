"""The operations: one file per matrix product, `convolutions`, `attention`, and `quantizers` of activations."""

from epiloq._torch.threads import share_threads
from epiloq.ops.attention.scaled_bmm import scaled_bmm
from epiloq.ops.convolutions.conv2d_int8 import conv2d_int8
from epiloq.ops.convolutions.conv2d_weight_only import conv2d_weight_only
from epiloq.ops.fp4_mm import fp4_mm
from epiloq.ops.fp8_weight_mm import fp8_weight_mm
from epiloq.ops.grouped_mm import grouped_mm
from epiloq.ops.grouped_packed_mm import grouped_packed_mm
from epiloq.ops.groupwise_mm import groupwise_mm
from epiloq.ops.lookup_int8 import lookup_int8
from epiloq.ops.online_quant_mm import online_quant_mm
from epiloq.ops.online_quant_weight import online_quant_weight
from epiloq.ops.packed_fp4_mm import packed_fp4_mm
from epiloq.ops.quantizers.quantize_blockwise_int8 import quantize_blockwise_int8
from epiloq.ops.quantizers.quantize_fp8 import quantize_fp8
from epiloq.ops.quantizers.quantize_int8 import quantize_int8
from epiloq.ops.quantizers.rms_norm import rms_norm
from epiloq.ops.quantizers.rms_norm_quant import rms_norm_quant
from epiloq.ops.quantizers.silu_and_mul import silu_and_mul
from epiloq.ops.quantizers.silu_and_mul_quant import silu_and_mul_quant
from epiloq.ops.requantized_mm import requantized_mm
from epiloq.ops.scaled_mm import scaled_mm, scaled_mm_azp
from epiloq.ops.table_mm import table_mm
from epiloq.ops.w4a8_mm import w4a8_mm
from epiloq.ops.weight_only_mm import weight_only_mm

__all__ = [
    "conv2d_int8",
    "conv2d_weight_only",
    "fp4_mm",
    "fp8_weight_mm",
    "grouped_mm",
    "grouped_packed_mm",
    "groupwise_mm",
    "lookup_int8",
    "online_quant_mm",
    "online_quant_weight",
    "packed_fp4_mm",
    "quantize_blockwise_int8",
    "quantize_fp8",
    "quantize_int8",
    "requantized_mm",
    "rms_norm",
    "rms_norm_quant",
    "scaled_bmm",
    "scaled_mm",
    "scaled_mm_azp",
    "silu_and_mul",
    "silu_and_mul_quant",
    "table_mm",
    "w4a8_mm",
    "weight_only_mm",
]

share_threads()
