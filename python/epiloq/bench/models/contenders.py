"""Benchmarked models: a known shape or a directory, in 16 bits, quantised, or quantised by another package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import epiloq
from epiloq.bench.contract import Unavailable
from epiloq.bench.models.plan import SHAPES
from epiloq.bench.peers.whole_models import PEERS


def build(model: str | Path, layers: int | None, dtype: torch.dtype, device: str) -> Any:
    """Build a model in eval mode: from a directory, or from a named shape with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if str(model) not in SHAPES:
        if not Path(model).is_dir():
            raise ValueError(f"bench: --model: expected a directory or one of {', '.join(SHAPES)}, got {str(model)!r}")
        if getattr(AutoConfig.from_pretrained(model), "quantization_config", None) is not None:
            raise ValueError(
                f"bench: --model: expected a model in floating point, which --scheme quantises, got {str(model)!r}, "
                "which is quantised already"
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        return loaded.to(device).eval()
    sizes: dict[str, Any] = SHAPES[str(model)] | ({} if layers is None else {"num_hidden_layers": layers})
    config = AutoConfig.for_model(**sizes, max_position_embeddings=8192)
    models: Any = AutoModelForCausalLM
    with torch.device(device):
        return models.from_config(config, dtype=dtype).eval()


def reason_of(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def prepare(
    model: nn.Module, scheme: str, optimized: bool, head: str | None = None, ignore: Sequence[str] = ()
) -> nn.Module:
    """Quantise the model by `scheme` (or by the package of that name, or not at all for "none") and optimise it.

    Raises Unavailable if the package is not installed or fails, ValueError if `ignore` names no layer.
    """
    if scheme in PEERS:
        try:
            return PEERS[scheme](model)
        except Unavailable:
            raise
        except Exception as error:
            raise Unavailable(reason_of(error)) from error
    if scheme != "none":
        epiloq.quantize_(model, scheme, head=head, ignore=ignore)
        if optimized:
            epiloq.optimize_(model)
    return model
