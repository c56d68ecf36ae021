"""Gates of experts, which combine the outputs of gate and up to the input of down."""

from __future__ import annotations

import copy
import itertools
import math
from typing import TypedDict, cast

import torch
from torch import Tensor, nn


class OwnGate(nn.Module):
    """The gate of a transformers module of stacked experts that defines its own ``_apply_gate``.

    It is called with gates and ups ``[…, I]``. Raises ValueError for a gate with parameters, or one that is not
    elementwise in gates and ups.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        # A copy without weights, and not a child module, because models initialise every module of its class.
        bare = copy.copy(experts)
        bare._parameters, bare._modules = {}, dict(experts._modules)
        if any(True for _ in bare.parameters()) or any(True for _ in bare.buffers()):
            raise ValueError("their gate has parameters")
        self.__dict__["experts"] = bare
        self.interleaved = not getattr(experts, "is_concatenated", True)
        if not self._is_elementwise():
            raise ValueError("their gate is not elementwise")

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        both = torch.stack((gate, up), -1).flatten(-2) if self.interleaved else torch.cat((gate, up), -1)
        result: Tensor = self.__dict__["experts"]._apply_gate(both)
        return result

    def _is_elementwise(self) -> bool:
        gate, up = _SAMPLE, _SAMPLE.flip(-1) * 1.5
        try:
            each = torch.cat([self(gate[:, i : i + 1], up[:, i : i + 1]) for i in range(gate.shape[1])], -1)
            found = self(gate, up)
            return found.shape == gate.shape and torch.allclose(found, each, rtol=1e-5, atol=1e-6)
        except Exception:  # a gate whose module raises any exception is not supported
            return False


# Sample inputs of both signs that exceed the usual limits of gates.
_SAMPLE = torch.linspace(-17, 15, 34, device="cpu", dtype=torch.float32).view(2, 17)


def gated(act_fn: nn.Module, *parts: Tensor) -> Tensor:
    """Apply an expert's gate to gates and ups, or its activation to ups alone."""
    if isinstance(act_fn, OwnGate):
        return cast(Tensor, act_fn(*parts))
    first: Tensor = act_fn(parts[0])
    return first * parts[1] if len(parts) > 1 else first


class Gate(TypedDict):
    """Options of `epiloq.silu_and_mul`."""

    alpha: float
    limit: float
    offset: float


def gate_of(act_fn: nn.Module) -> Gate | None:
    """Return the options with which `epiloq.silu_and_mul` computes `act_fn`, or None if it cannot.

    Its alpha and limit are found among the module's own numbers, and its offset is 0 or 1.
    """
    gate, up = _SAMPLE, _SAMPLE.flip(-1) * 1.5
    found = gated(act_fn, gate, up)
    own = vars(getattr(act_fn, "experts", act_fn)).values()
    numbers = {float(value) for value in own if type(value) in (int, float) and value > 0}
    for alpha, limit, offset in itertools.product((1.0, *numbers), (math.inf, *numbers), (0.0, 1.0)):
        limited = gate.clamp(max=limit)
        expected = limited * torch.sigmoid(alpha * limited) * (up.clamp(-limit, limit) + offset)
        if torch.allclose(expected, found, rtol=1e-5, atol=0):
            return Gate(alpha=alpha, limit=limit, offset=offset)
    return None
