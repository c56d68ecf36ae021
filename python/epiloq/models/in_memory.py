"""Saving of models that were quantised in memory by transformers."""

from __future__ import annotations

import sys

from torch import nn


def check_not_opened_quantised(model: nn.Module) -> None:
    """Raise ValueError for a model of transformers that another library's quantizer opened.

    Its ``save_pretrained`` describes that library's layers alone, and the directory opens with random weights in the
    place of others.
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
    """Have ``save_pretrained`` of a model of transformers write its layers' description beside their tensors.

    Without one, the directory would open with random weights in the place of quantised layers. Nothing is registered:
    directories open as before. Other models, and those that have a quantizer, are left as they are.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    if getattr(model, "hf_quantizer", None) is not None:
        return
    from epiloq.integrations.hf_quantizer.config import EpiloqConfig
    from epiloq.integrations.hf_quantizer.quantizer import EpiloqQuantizer

    model.hf_quantizer = EpiloqQuantizer(EpiloqConfig(), pre_quantized=True)
