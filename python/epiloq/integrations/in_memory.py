"""Models that were quantised in memory, and how transformers saves them."""

from __future__ import annotations

import importlib
import sys

from torch import nn

_PACKAGE = "epiloq.integrations.transformers"


def describe_on_saving(model: nn.Module) -> None:
    """Have ``save_pretrained`` of a model of transformers write its layers' description beside their tensors.

    Without one, the directory would open with random weights in the place of quantised layers. Whether epiloq opens
    directories in transformers stays as it was. Other models, and those that have a quantizer, are left as they are.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    if getattr(model, "hf_quantizer", None) is not None:
        return
    registered = _PACKAGE in sys.modules
    integration = importlib.import_module(_PACKAGE)
    if not registered:
        integration.unregister()
    model.hf_quantizer = integration.EpiloqQuantizer(integration.EpiloqConfig(), pre_quantized=True)
