"""Algorithms that quantise weights or prepare a model for quantisation: functions of layers and their inputs.

`epiloq.quantize.calibration.calibrate` applies them to a model block by block; it is not imported with epiloq.
"""

from __future__ import annotations

from epiloq.quantize.algorithms.autoround import autoround
from epiloq.quantize.algorithms.awq import awq, awq_scale, output_error
from epiloq.quantize.algorithms.gptq import gptq
from epiloq.quantize.algorithms.hadamard import hadamard
from epiloq.quantize.algorithms.refine import refine
from epiloq.quantize.algorithms.rotate import Rotated, rotate_
from epiloq.quantize.algorithms.smoothquant import Smoothed, fold_, search_smooth_scale, smooth_scale, smoothquant_
from epiloq.quantize.calibration.statistics import InputStatistics
from epiloq.weights.codebooks import CodedWeight, Float8Grid, Fp4Grid, OffsetGrid
from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.rounding import fit, rtn

__all__ = [
    "CodedWeight",
    "Float8Grid",
    "Fp4Grid",
    "Grid",
    "InputStatistics",
    "OffsetGrid",
    "QuantizedWeight",
    "Rotated",
    "Smoothed",
    "autoround",
    "awq",
    "awq_scale",
    "fit",
    "fold_",
    "gptq",
    "hadamard",
    "output_error",
    "refine",
    "rotate_",
    "rtn",
    "search_smooth_scale",
    "smooth_scale",
    "smoothquant_",
]
