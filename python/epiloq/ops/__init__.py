"""The operations, one file each."""

from epiloq.ops.online_quant_mm import online_quant_mm
from epiloq.ops.online_quant_weight import online_quant_weight
from epiloq.ops.quantize_blockwise_int8 import quantize_blockwise_int8
from epiloq.ops.quantize_int8 import quantize_int8
from epiloq.ops.scaled_mm import scaled_mm, scaled_mm_azp

__all__ = [
    "online_quant_mm",
    "online_quant_weight",
    "quantize_blockwise_int8",
    "quantize_int8",
    "scaled_mm",
    "scaled_mm_azp",
]
