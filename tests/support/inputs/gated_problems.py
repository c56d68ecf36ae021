"""Gated experts of every kind, routed tokens, and their outputs in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.nn import (
    ExpertLinears,
    Fp4Linear,
    Fp8BlockExperts,
    Fp8BlockLinear,
    Fp8Experts,
    Fp8Linear,
    GatedExperts,
    Int8Experts,
    Int8Linear,
    PackedExperts,
    PackedFp4Experts,
    W4A8Experts,
    W4A8Fp4Experts,
    W4A8Fp4Linear,
    W4A8Linear,
    WeightOnlyLinear,
)
from fp4_reference import dequantized

Make = Callable[[nn.Linear], nn.Module]
EXPERTS, TOP_K = 5, 3
KINDS: dict[str, tuple[Make, type, tuple[float, int]]] = {
    # The largest code, and how many inputs share a scale (0: all).
    "fp8-block": (Fp8BlockLinear.from_linear, Fp8BlockExperts, (448, 128)),
    "fp8-token": (Fp8Linear.from_linear, Fp8Experts, (448, 0)),
    "fp8": (lambda layer: Fp8Linear.from_linear(layer, activation="tensor", weight="tensor"), Fp8Experts, (448, 0)),
    "int8": (Int8Linear.from_linear, Int8Experts, (127, 0)),
    "w4a8-fp8": (lambda layer: W4A8Linear.from_linear(layer, group_size=64, zeros="zero"), W4A8Experts, (448, 0)),
    "w4a8-int8": (lambda layer: W4A8Linear.from_linear(layer, activation="int8"), W4A8Experts, (127, 0)),
    # Activations stay as they are.
    "w4a16": (lambda layer: WeightOnlyLinear.from_linear(layer, group_size=32, zeros="zero"), PackedExperts, (0, 0)),
    "w8a16": (lambda layer: WeightOnlyLinear.from_linear(layer, bits=8, group_size=-1), PackedExperts, (0, 0)),
    "mxfp4": (lambda layer: Fp4Linear.from_linear(layer, format="mxfp4"), PackedFp4Experts, (0, 0)),
    # Every matrix has a global scale of its own.
    "nvfp4": (lambda layer: Fp4Linear.from_linear(layer, format="nvfp4"), PackedFp4Experts, (0, 0)),
    "mxfp4-fp8": (lambda layer: W4A8Fp4Linear.from_linear(layer, format="mxfp4"), W4A8Fp4Experts, (448, 0)),
    "nvfp4-fp8": (lambda layer: W4A8Fp4Linear.from_linear(layer, format="nvfp4"), W4A8Fp4Experts, (448, 0)),
    "nvfp4-int8": (
        lambda layer: W4A8Fp4Linear.from_linear(layer, format="nvfp4", activation="int8"),
        W4A8Fp4Experts,
        (127, 0),
    ),
    "mxfp4-fp8-group": (
        lambda layer: W4A8Fp4Linear.from_linear(layer, format="mxfp4", activation="fp8-group"),
        W4A8Fp4Experts,
        (448, 128),
    ),
    "nvfp4-fp8-group": (
        lambda layer: W4A8Fp4Linear.from_linear(layer, format="nvfp4", activation="fp8-group"),
        W4A8Fp4Experts,
        (448, 128),
    ),
}


def floats(hidden: int, inner: int, dtype: torch.dtype = torch.float32, act_fn: nn.Module | None = None) -> Any:
    """Experts of plain linear layers."""

    def layer(n: int, k: int) -> nn.Linear:
        return nn.Linear(k, n, bias=False, dtype=dtype)

    names = ("gate_proj", "up_proj", "down_proj")
    each = [
        dict(zip(names, (layer(inner, hidden), layer(inner, hidden), layer(hidden, inner)), strict=True))
        for _ in range(EXPERTS)
    ]
    return ExpertLinears(each, act_fn or nn.SiLU())


def quantised(experts: ExpertLinears, make: Make) -> ExpertLinears:
    found = copy.deepcopy(experts)
    for number in range(EXPERTS):
        layers: Any = found.get_submodule(str(number))
        for name in found.projections.names:
            layers[name] = make(layers[name])
    return found


def together(experts: ExpertLinears) -> GatedExperts:
    found = GatedExperts.from_linears(experts)
    assert found is not None
    return found


def routed(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs that leave the last expert without rows."""
    index = torch.rand(tokens, EXPERTS - 1).argsort(1)[:, :TOP_K]
    return torch.randn(tokens, hidden).to(dtype), index, torch.rand(tokens, TOP_K)


def rounded(x: Tensor, grid: tuple[float, int]) -> Tensor:
    """A row on its grid, float64."""
    largest, group = grid
    if not largest:
        return x
    parts = []
    for part in x.split(group or x.shape[-1], -1):
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
        q = part / scale
        parts.append((q.round() if largest == 127 else q.float().to(torch.float8_e4m3fn).double()) * scale)
    return torch.cat(parts, -1)


def weight_of(layer: Any) -> Tensor:
    """The weight of a quantised layer, float64."""
    if isinstance(layer, (W4A8Linear, WeightOnlyLinear)):
        found: Tensor = layer.packed.dequantize()
        return found.double()
    state = layer.file_state()
    if isinstance(layer, Fp4Linear):
        divisor = state.get("weight_global_scale")
        factor = None if divisor is None else divisor.reciprocal()
        return dequantized(state["weight"], state["weight_scale"], factor, layer.in_features)
    weight = state["weight"].double()
    if "weight_scale" in state:
        return weight * state["weight_scale"].double().view(-1, 1)
    wide = state["weight_scale_inv"].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight * wide[: weight.shape[0], : weight.shape[1]]


def first_products(experts: ExpertLinears, x: Tensor, index: Tensor, grid: tuple[float, int]) -> Tensor:
    """Gates and ups in float64, [token, its experts, 2 inner]."""

    def of(token: int, expert: int) -> Tensor:
        gate, up, _ = map(weight_of, experts.layers(expert))
        return torch.cat((gate, up)) @ rounded(x[token].double(), grid)

    return torch.stack([torch.stack([of(t, e) for e in row]) for t, row in enumerate(index.tolist())])


def expected(experts: ExpertLinears, gates: Tensor, index: Tensor, weights: Tensor, grid: tuple[float, int]) -> Tensor:
    """The outputs for gates and ups, token by token, in float64."""
    tokens = []
    for of_token, chosen, shares in zip(gates.double(), index.tolist(), weights.tolist(), strict=True):
        sums = 0
        for both, expert, share in zip(of_token, chosen, shares, strict=True):
            gate, up = both.chunk(2)
            down = weight_of(list(experts.layers(expert))[2])
            sums = sums + share * (down @ rounded(gate / (1 + torch.exp(-gate)) * up, grid))
        tokens.append(sums)
    return torch.stack(tokens)


def gates_of(found: GatedExperts, products: Tensor, index: Tensor) -> Tensor:
    """Rows by expert and halves with padding, as `first_products` has them."""
    parts = [products[:, first : first + found.intermediate] for first in (0, found.up_begins)]
    order = index.flatten().sort(stable=True).indices
    return torch.cat(parts, -1).cpu()[order.argsort()].view(*index.shape, -1)
