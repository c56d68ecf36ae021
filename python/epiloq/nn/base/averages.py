"""Averages of a model's parameters by torch, without the frozen ones of quantised layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def leave_out_of_averages(kind: type[nn.Module]) -> None:
    """Make `torch.optim.swa_utils.AveragedModel` copy, and not average, the parameters without gradients of modules of
    class `kind`.

    torch averages integers too, in floating point, and truncates the results; some of its averages refuse integers.
    """
    average: Any = AveragedModel.update_parameters

    @functools.wraps(average)
    def update_parameters(self: Any, model: nn.Module) -> None:
        averaged, current = _Frozen(self.module, kind), _Frozen(model, kind)
        if averaged.places != current.places:
            raise ValueError(
                "AveragedModel.update_parameters: model: expected frozen parameters of quantised layers at the same "
                f"places as in the average, which has {len(averaged.places)}, got {len(current.places)}: quantise the "
                "model before making the average"
            )
        with averaged.left_out(), current.left_out():
            average(self, model)
        with torch.no_grad():
            for mean, value in zip(averaged.parameters, current.parameters, strict=True):
                mean.detach().copy_(value.detach())

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


class _Frozen:
    """The frozen parameters of a model's modules of a class.

    `places` are those among all parameters, by which torch pairs two models: one may be wrapped in a module of DDP.
    """

    def __init__(self, model: nn.Module, kind: type[nn.Module]) -> None:
        self._names = [
            (module, name, parameter)
            for module in model.modules()
            if isinstance(module, kind)
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]
        own = {id(parameter) for _, _, parameter in self._names}
        found = [(i, parameter) for i, parameter in enumerate(model.parameters()) if id(parameter) in own]
        self.places, self.parameters = [i for i, _ in found], [parameter for _, parameter in found]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """The model without them."""
        whole: dict[nn.Module, dict[str, Tensor | None]] = {}
        for module, name, _ in self._names:
            whole.setdefault(module, dict(module._parameters))
            del module._parameters[name]
        try:
            yield
        finally:
            for module, parameters in whole.items():
                module._parameters.clear()
                module._parameters.update(parameters)  # type: ignore[arg-type]
