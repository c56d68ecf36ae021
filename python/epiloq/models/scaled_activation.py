"""Activation functions whose output is divided by a vector, as AWQ leaves them where no norm or linear layer is before.

Files of llm-awq and AutoAWQ have the vector as "scales" of the activation function.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

SCALES = ".scales"
"""The end of their names in files."""


class ScaledActivation(nn.Module):
    """``act(x) / scales``, in float32 and rounded once to the dtype of ``act(x)``; scales ``[width]``."""

    def __init__(self, act: nn.Module, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.act = act
        self.scales = nn.Parameter(torch.ones(width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(x)
        return (y.float() / self.scales.float()).to(y.dtype)


def scale_activations_(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Replace each activation function that has a scale by a `ScaledActivation`; return their names.

    `shapes` of files' tensors by the names that the model would give them.
    """
    scaled, modules = [], dict(model.named_modules())
    for name, shape in shapes.items():
        layer = name.removesuffix(SCALES)
        parent, _, leaf = layer.rpartition(".")
        holder: nn.Module | None = modules.get(parent)
        act = None if holder is None else holder._modules.get(leaf)
        # Those of a quantised layer are its own.
        if len(shape) != 1 or holder is None or act is None or next(act.parameters(), None) is not None:
            continue
        first = next(model.parameters())
        setattr(holder, leaf, ScaledActivation(act, shape[0], first.dtype, first.device).train(act.training))
        scaled.append(layer)
    return scaled
