"""Algorithms that quantise weights, or prepare a model for it: plain functions on layers and their inputs."""

from __future__ import annotations

from epiloq.quantize.awq import awq, awq_scale, output_error
from epiloq.quantize.gptq import gptq
from epiloq.quantize.grid import Grid, QuantizedWeight, fit, rtn
from epiloq.quantize.smoothquant import Smoothed, fold_, smooth_scale, smoothquant_
from epiloq.quantize.statistics import InputStatistics

__all__ = [
    "Grid",
    "InputStatistics",
    "QuantizedWeight",
    "Smoothed",
    "awq",
    "awq_scale",
    "fit",
    "fold_",
    "gptq",
    "output_error",
    "rtn",
    "smooth_scale",
    "smoothquant_",
]
