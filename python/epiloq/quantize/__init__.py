"""Algorithms that prepare a model for quantisation: plain functions on layers and their inputs."""

from __future__ import annotations

from epiloq.quantize.smoothquant import Smoothed, fold_, smooth_scale, smoothquant_

__all__ = ["Smoothed", "fold_", "smooth_scale", "smoothquant_"]
