"""Saving with transformers of models that were quantised in memory."""

from __future__ import annotations

import sys

from torch import nn


def check_not_opened_quantised(model: nn.Module) -> None:
    """Raise ValueError for a transformers model opened by another library's quantizer.

    Its ``save_pretrained`` would describe only that library's layers, and the directory would open with random weights
    for the others.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not type(quantizer).__module__.startswith("epiloq."):
        method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", type(quantizer).__name__)
        name = getattr(method, "value", method)
        raise ValueError(
            f"quantize_: model: expected a float model, got one that transformers opened by {name}: quantise the "
            "float model, or open the files by epiloq (import epiloq.integrations.transformers before from_pretrained)"
        )


def describe_on_saving(model: nn.Module) -> None:
    """Make ``save_pretrained`` of a transformers model also write the description of its quantised layers.

    Without it the directory would open with random weights for quantised layers. Nothing is registered, so directories
    open as before. Other models and those with a quantizer are unchanged.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    if getattr(model, "hf_quantizer", None) is not None:
        return
    from epiloq.integrations.hf_quantizer.config import EpiloqConfig
    from epiloq.integrations.hf_quantizer.quantizer import EpiloqQuantizer

    model.hf_quantizer = EpiloqQuantizer(EpiloqConfig(), pre_quantized=True)
