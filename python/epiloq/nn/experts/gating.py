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
            return found.shape == gate.shape and torch.allclose(found, each, rtol=1e-5, atol=1e-5)
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

    Its alpha and limit are found among the module's own numbers, and its offset is 0 or 1. A module with parameters or
    buffers is not recognised, because these may change.
    """
    if any(True for _ in act_fn.parameters()) or any(True for _ in act_fn.buffers()):
        return None
    numbers = _positive_numbers(act_fn.__dict__["experts"] if isinstance(act_fn, OwnGate) else act_fn)
    gate, up = _grid(numbers)
    try:
        found = gated(act_fn, gate, up)
    except Exception:  # as above
        return None
    if found.shape != gate.shape or found.dtype != gate.dtype:
        return None
    points = torch.stack((gate, up, found)).flatten(1)
    few_points = points[:, ::_FEW]
    for alpha, limit, offset in itertools.product((1.0, *numbers), (math.inf, *numbers), (0.0, 1.0)):
        candidate = Gate(alpha=alpha, limit=limit, offset=offset)
        if _matches(few_points, candidate) and _matches(points, candidate):
            return candidate
    return None


_FEW = 37  # every 37th point rules out most candidates


def _matches(points: Tensor, candidate: Gate) -> bool:
    """Whether a gate gives these results up to rounding, also that of exponents up to 100; below 1e-25 all are 0."""
    gate, up, found = points
    limit, limited = candidate["limit"], gate.clamp(max=candidate["limit"])
    expected = limited * torch.sigmoid(candidate["alpha"] * limited) * (up.clamp(-limit, limit) + candidate["offset"])
    return torch.allclose(expected, found, rtol=3e-5, atol=1e-25)


def _positive_numbers(module: nn.Module) -> list[float]:
    """The attributes that may be an alpha or a limit: positive numbers within float32, sorted."""
    own = {value for value in vars(module).values() if type(value) in (int, float)}
    return sorted(float(value) for value in own if 0 < value <= torch.finfo(torch.float32).max)


def _grid(numbers: list[float]) -> tuple[Tensor, Tensor]:
    """Gates and factors ``[G, U]`` at which gates differ: of both signs, from 1e-3 to 1e6, on both sides of each
    number, which may be a limit, and where a sigmoid with it as alpha bends."""
    magnitudes = [10 ** (power / 4) for power in range(-12, 25)]
    near = [number * factor for number in numbers for factor in (0.75, 1.25)]
    bends = [factor / number for number in numbers for factor in (0.3, 1.0, 3.0)]
    gates, ups = (_of_both_signs(values) for values in ([*magnitudes, *near, *bends], [*magnitudes[::2], *near]))
    shape = len(gates), len(ups)
    return gates[:, None].expand(shape).contiguous(), ups.expand(shape).contiguous()


def _of_both_signs(values: list[float]) -> Tensor:
    positive = torch.tensor(sorted(set(values)), dtype=torch.float32, device="cpu")
    positive = positive[positive.isfinite()]
    return torch.cat((-positive.flip(0), positive))
