"""The argument by which a transformers model takes its key-value cache."""

from __future__ import annotations

import inspect

from torch import nn


def cache_argument(model: nn.Module) -> str:
    """Name of the forward argument for the key-value cache, which differs between versions of transformers."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
