"""Models of transformers, opened, and what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from epiloq.schemes import QuantisedLinear

TOKENS = torch.arange(24).view(2, 12) * 7 + 1  # Without 0, which pads.


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def opened(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def rotary_frequencies_of_old(layers: int) -> dict[str, torch.Tensor]:
    """Tables that a Llama's files held in each layer until 2023, dots in their names given by "__"."""
    return {f"model__layers__{i}__self_attn__rotary_emb__inv_freq": torch.ones(8) for i in range(layers)}
