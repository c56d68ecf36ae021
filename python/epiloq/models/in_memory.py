"""Saving of models that were quantised in memory by transformers."""

from __future__ import annotations

import sys

from torch import nn


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
