"""Modules on quantised weights."""

from __future__ import annotations

from epiloq.nn.int8_linear import Int8Linear
from epiloq.nn.online_quant_linear import OnlineQuantLinear
from epiloq.nn.weight_only_linear import WeightOnlyLinear

__all__ = ["Int8Linear", "OnlineQuantLinear", "WeightOnlyLinear"]
