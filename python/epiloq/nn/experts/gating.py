"""Gates of experts, which combine the outputs of gate and up to the input of down."""

from __future__ import annotations

import copy
import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


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


def limit_of(act_fn: nn.Module) -> float | None:
    """L if `act_fn` computes ``silu(min(gate, L)) * clamp(up, -L, L)``, infinity for SiLU without limits, else None."""
    gate, up = _SAMPLE, _SAMPLE.flip(-1) * 1.5
    limits = [value for value in vars(getattr(act_fn, "experts", act_fn)).values() if type(value) in (int, float)]
    found = gated(act_fn, gate, up)
    for limit in (math.inf, *limits):
        if limit > 0 and torch.equal(functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), found):
            return float(limit)
    return None
