"""The operations, one file each."""

from epiloq.ops.quantize_int8 import quantize_int8
from epiloq.ops.scaled_mm import scaled_mm, scaled_mm_azp
from epiloq.ops.weight_only_mm import weight_only_mm

__all__ = ["quantize_int8", "scaled_mm", "scaled_mm_azp", "weight_only_mm"]
