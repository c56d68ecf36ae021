"""The operations, one file each."""

from epiloq.ops.quantize_fp8 import quantize_fp8
from epiloq.ops.quantize_int8 import quantize_int8
from epiloq.ops.scaled_mm import scaled_mm, scaled_mm_azp

__all__ = ["quantize_fp8", "quantize_int8", "scaled_mm", "scaled_mm_azp"]
