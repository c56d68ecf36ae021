"""Modules of transformers that hold the experts of a layer as stacked matrices, and the linear layers that they are."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from epiloq.nn import ExpertLinears
from epiloq.nn.experts.expert_linears import Projections
from epiloq.nn.experts.gating import OwnGate

# Properties that transformers' experts interface sets on a module, and their defaults.
_MARKS = ("has_bias", "is_transposed")
_DEFAULTS = {"has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False}
_WITHOUT_MARKS = frozenset({"Step3p7Experts", "LongcatFlashExperts"})
"""Classes of transformers that are called as those of the interface are, though they do not take part in it."""
_GATE_UP, _UP, _DOWN, _BIAS, _NORM = ("gate_up_proj", "up_proj", "down_proj", "_bias", "post_expert_norm")
BEFORE = "before"
"""Where `ExpertLinears` keep the module that was taken apart."""


def reason_against(module: nn.Module) -> str | None:
    """Return why stacked experts cannot be taken apart; None if they can."""
    kind = type(module)
    without = kind.__name__ in _WITHOUT_MARKS and kind.__module__.startswith("transformers.")
    if not without and not all(hasattr(module, mark) for mark in _MARKS):
        return "not called as the experts of transformers are"
    if getattr(module, "_is_expert_parallel", False):
        return "split among ranks already"
    if declared(module, "has_post_expert_norm") and not isinstance(getattr(module, _NORM, None), nn.Module):
        return f"without a module {_NORM}, though has_post_expert_norm is set"
    parameters, expected = dict(module.named_parameters(recurse=False)), _tensors(module)
    if parameters.keys() != set(expected):
        return f"made of {', '.join(sorted(parameters))}, expected {' and '.join(expected)}"
    first, down = (matrices.shape for matrices in _matrices(module))
    count, rows, hidden = down[0], first[1], first[2]
    fits = first[0] == count + identities(module) and rows % in_one(module) == 0
    if not fits or down != (count, hidden, rows // in_one(module)):
        return "of shapes {} and {}".format(*(list(parameters[name].shape) for name in stacked_names(module)))
    try:
        _act_fn(module)
    except ValueError as error:
        return str(error)
    return None


def declared(module: nn.Module, mark: str) -> Any:
    """Return a module's attribute about how its experts are stacked and run, or the usual value."""
    return getattr(module, mark, _DEFAULTS[mark])


def stacked_names(module: Any) -> tuple[str, str]:
    """The names of the parameters with the matrices of experts that can be taken apart."""
    return _GATE_UP if getattr(module, "has_gate", True) else _UP, _DOWN


def in_one(module: nn.Module) -> int:
    """Return the number of an expert's matrices in the first of these parameters."""
    return 2 if stacked_names(module)[0] == _GATE_UP else 1


def identities(module: nn.Module) -> int:
    """Return the number of additional experts that return their tokens unchanged (LongCat's zero experts)."""
    return int(getattr(module, "zero_expert_num", 0)) if hasattr(module, "identity_expert") else 0


def apart_from(module: nn.Module, projections: Projections) -> ExpertLinears:
    """The same experts with a linear layer for each matrix, sharing memory."""
    biases = _biases(module) if declared(module, "has_bias") else (None, None)
    parts = [_split(module, values) for values in (_matrices(module)[0], biases[0])]
    down, down_bias = _matrices(module)[1], biases[1]
    experts = []
    for expert in range(down.shape[0]):
        layers = [
            _linear(matrices[expert], bias[expert] if bias is not None else None)
            for matrices, bias in zip(*parts, strict=True)
            if matrices is not None
        ]
        layers.append(_linear(down[expert], None if down_bias is None else down_bias[expert]))
        experts.append(dict(zip(projections.names, layers, strict=True)))
    norm = getattr(module, _NORM) if declared(module, "has_post_expert_norm") else None
    made = ExpertLinears(experts, _act_fn(module), identities=identities(module), post_expert_norm=norm)
    made.__dict__[BEFORE] = module
    return made.train(module.training)


@torch.no_grad()
def as_before(linears: ExpertLinears) -> nn.Module | None:
    """The module that was taken apart, with the weights that its layers now have; None if any is quantised."""
    before = linears.before
    if before is None or not is_float(linears):
        return None
    layers = [cast("tuple[nn.Linear, ...]", linears.layers(e)) for e in range(linears.experts)]
    old = {parameter.untyped_storage().data_ptr() for parameter in before.parameters(recurse=False)}
    tensors = [tensor for each in layers for layer in each for tensor in (layer.weight, layer.bias)]
    if any(tensor is not None and tensor.untyped_storage().data_ptr() not in old for tensor in tensors):
        _write_back(before, layers)
    return before


def is_float(linears: ExpertLinears) -> bool:
    """Whether no layer of experts that are apart is quantised."""
    return all(type(layer) is nn.Linear for expert in range(linears.experts) for layer in linears.layers(expert))


def _write_back(before: Any, layers: list[tuple[nn.Linear, ...]]) -> None:
    """Give a module the weights, and biases, that linear layers have now."""
    weights: list[list[Tensor]] = [[layer.weight for layer in each] for each in layers]
    both = _joined(before, weights), torch.stack([each[-1] for each in weights])
    turned = [t.mT.contiguous() if declared(before, "is_transposed") else t for t in both]
    values = dict(zip(stacked_names(before), turned, strict=True))
    if declared(before, "has_bias"):
        biases: list[list[Tensor]] = [[layer.bias for layer in each] for each in layers]
        joined = _joined(before, biases), torch.stack([each[-1] for each in biases])
        values |= {f"{name}{_BIAS}": t for name, t in zip(stacked_names(before), joined, strict=True)}
    for name, tensor in values.items():
        rest = before.get_parameter(name).data[tensor.shape[0] :]  # Identity experts have no layers.
        if len(rest):
            unused = torch.zeros_like(rest, device=tensor.device) if rest.is_meta else rest
            tensor = torch.cat((tensor, unused))
        setattr(before, name, nn.Parameter(tensor, requires_grad=False))


def _tensors(module: nn.Module) -> tuple[str, ...]:
    names = stacked_names(module)
    return (*names, *(f"{name}{_BIAS}" for name in names)) if declared(module, "has_bias") else names


def _matrices(module: nn.Module) -> list[Tensor]:
    """The values of the parameters with matrices, ``[E, N, K]`` each."""
    found = [module.get_parameter(name).data for name in stacked_names(module)]
    return [values.mT if declared(module, "is_transposed") else values for values in found]


def _biases(module: nn.Module) -> tuple[Tensor, Tensor]:
    first, down = (module.get_parameter(f"{name}{_BIAS}").data for name in stacked_names(module))
    return first, down


def _split(module: nn.Module, values: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gates and ups, or ups alone, ``[E, N, ..]``, of one parameter."""
    count = in_one(module)
    if values is None:
        return (None,) * count
    if declared(module, "is_concatenated"):
        return values.chunk(count, 1)
    return tuple(values[:, part::count] for part in range(count))


def _joined(module: nn.Module, each: list[list[Tensor]]) -> Tensor:
    """The inverse of `_split`, of all matrices (or biases) of each expert but the last."""
    if declared(module, "is_concatenated"):
        return torch.stack([torch.cat(parts[:-1]) for parts in each])
    return torch.stack([torch.stack(parts[:-1], 1).flatten(0, 1) for parts in each])


def _act_fn(module: nn.Module) -> nn.Module:
    """Return the gating activation. Raises ValueError for a gate that is not supported."""
    gate = getattr(type(module), "_apply_gate", None)
    usual = gate is None or gate.__module__ == "transformers.integrations.moe"
    if (usual and declared(module, "is_concatenated")) or in_one(module) == 1:
        return cast(nn.Module, module.act_fn)
    return OwnGate(module)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
