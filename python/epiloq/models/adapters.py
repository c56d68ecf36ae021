"""Layers of PEFT adapters, which are trained and stay in floating point."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

_WRAPPERS = {
    "peft.tuners.tuners_utils": ("BaseTunerLayer", "base_layer"),
    "peft.utils.other": ("AuxiliaryTrainingWrapper", "original_module"),
}
"""Modules of PEFT: a class that wraps a layer, and the child that is the layer of the model."""


def adapter_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that PEFT's tuners, and the copies that it trains (``modules_to_save``), add to a model's layers."""
    # A model has none unless PEFT has been imported.
    loaded = [(getattr(sys.modules.get(module), name, None), base) for module, (name, base) in _WRAPPERS.items()]
    wrappers = [(kind, base) for kind, base in loaded if isinstance(kind, type)]
    for module in model.modules():
        for kind, base in wrappers:
            if isinstance(module, kind):
                for name, child in module.named_children():
                    yield from () if name == base else child.modules()
