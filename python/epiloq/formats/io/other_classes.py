"""Parts that only some of transformers' classes for one configuration have, such as the pooler of encoders: a base
model has it, and the same model with a head for masked tokens has not."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from epiloq.formats.io.architecture import architecture, has, transformers_config
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.names import with_and_without_prefix


def is_missing_in_saved(model: nn.Module, checkpoint: Checkpoint, part: str) -> bool:
    """Whether a part of a transformers model has no tensor in the files, and the class that wrote them has no such
    part. transformers initialises it."""
    names = with_and_without_prefix(model, part)
    if any(file.startswith(f"{name}.") for file in checkpoint.files for name in names):
        return False
    saved = _outline(architecture(checkpoint), transformers_config(checkpoint))
    return saved is not None and not any(has(saved, name) for name in names)


def layers_of_base_model(model: nn.Module) -> set[str]:
    """Names of the linear layers that the base model's own class has and `model` has not, with and without its
    prefix."""
    config = getattr(model, "config", None)
    if config is None or not getattr(model, "base_model_prefix", ""):
        return set()
    from transformers import MODEL_MAPPING

    kind = MODEL_MAPPING.get(type(config), None)
    base = _outline(kind, config) if isinstance(kind, type) and type(model) is not kind else None
    if base is None:
        return set()
    layers = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
    both = [with_and_without_prefix(model, name) for name in layers]
    return {name for names in both if not any(has(model, name) for name in names) for name in names}


def _outline(kind: Any, config: Any) -> nn.Module | None:
    """A model without values; None if transformers cannot build it."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            model: nn.Module = kind(config)
            return model
    except Exception:  # e.g. a package that the class needs is missing
        return None
