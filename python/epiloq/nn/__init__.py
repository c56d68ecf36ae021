"""Modules on quantised weights."""

from __future__ import annotations

from epiloq.nn.int8_linear import Int8Linear

__all__ = ["Int8Linear"]
