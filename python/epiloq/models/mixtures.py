"""Mixtures of experts in models of transformers: their stacked matrices one by one for quantisers and files, and back.

transformers keeps the experts of a layer as two stacked parameters, checkpoints have a matrix an expert. `apart` puts
``nn.ExpertLinears`` in their place, so that whatever knows ``nn.Linear`` knows experts; `together_` puts what runs them
in its place: ``nn.GatedExperts``, or the module that was there. Those modules are found by structure, for
transformers runs every class of the same structure by the same functions (its experts interface), whatever its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from epiloq.nn import ExpertLinears, GatedExperts
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES
from epiloq.nn.base.quantized_layer import StoredTensors
from epiloq.nn.experts.expert_linears import Projections
from epiloq.nn.experts.gating import OwnGate

# What transformers' experts interface says of a module, and must say of one that can be taken apart: the first two in
# every version, the others since there is a choice.
_MARKS = ("has_bias", "is_transposed")
_TRAITS = {
    "has_bias": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}
_GATE_UP, _UP, _DOWN = ("gate_up_proj", "up_proj", "down_proj")
# Where a module that was taken apart keeps the one that was there; no child, so that its tensors are not counted.
_BEFORE = "before"


def stacked(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by name that hold stacked matrices of experts: parameters of three dimensions, beside torch's layers,
    of which there are as many as the module says it has experts, or two whose matrices follow one another."""
    found = {name: module for name, module in model.named_modules() if _count(module)}
    return {name: module for name, module in found.items() if not isinstance(module, (ExpertLinears, GatedExperts))}


def reason_against(module: nn.Module) -> str | None:
    """Why stacked experts cannot be taken apart; None if they can."""
    if not all(hasattr(module, mark) for mark in _MARKS):
        return "not called as the experts of transformers are"
    for trait, wanted in _TRAITS.items():
        if getattr(module, trait, wanted) != wanted:
            return f"{trait.lstrip('_')} is {getattr(module, trait)}, expected {wanted}"
    parameters, expected = dict(module.named_parameters(recurse=False)), _stacked(module)
    if parameters.keys() != set(expected):
        return f"made of {', '.join(sorted(parameters))}, expected {' and '.join(expected)}"
    (experts, rows, hidden), down = (matrices.shape for matrices in _matrices(module))
    if rows % _in_one(module) or down != (experts, hidden, rows // _in_one(module)):
        return "of shapes {} and {}".format(*(list(parameters[name].shape) for name in expected))
    try:
        _act_fn(module)
    except ValueError as error:
        return str(error)
    return None


def left_stacked(model: nn.Module) -> dict[str, str]:
    """Stacked modules, by name, that stay in floating point whatever is asked for, and why."""
    reasons = {name: reason_against(module) for name, module in stacked(model).items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by name that weigh experts: beside them, or in what is, with a row for each; or one for a shared one."""
    found = {}
    for name, module in model.named_modules():
        counts = {count for child in module.children() if (count := _count(child))}
        beside = [(leaf, child) for leaf, child in module.named_children() if counts and not _count(child)]
        for leaf, child in beside:
            for inner, layer in child.named_modules(prefix=f"{name}.{leaf}" if name else leaf):
                weight, rows = getattr(layer, "weight", None), {1, *counts} if layer is child else counts
                if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[0] in rows:
                    found[inner] = layer
    return found


def why_stacked(model: nn.Module, layer: str) -> str:
    """The end of a sentence that says why a layer of an expert is not there, or nothing."""
    for name, reason in left_stacked(model).items():
        if layer.startswith(f"{name}."):
            return f", for {name} cannot be taken apart: {reason}"
    return ""


def left_beside(model: nn.Module, quantised: Collection[str]) -> set[str]:
    """Modules in floating point that are no linear layers but whose matrices a format might take for quantised.

    Routers, and experts of which no layer is among those quantised.
    """
    with_some = {name.rsplit(".", 2)[0] for name in quantised if name.count(".") > 1}
    apart = {name for name, module in model.named_modules() if isinstance(module, ExpertLinears)}
    return {*routers(model), *stacked(model), *(apart - with_some)}


@torch.no_grad()
def take_apart_(model: nn.Module, takes: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Put ``ExpertLinears`` in the place of stacked experts of which ``takes(name)``, sharing memory; give their names.

    Names of matrices are those that transformers would save.
    """
    found = {name: m for name, m in stacked(model).items() if name and takes(name) and reason_against(m) is None}
    known: dict[type[nn.Module], Projections] = {}
    for name, module in found.items():
        if type(module) not in known:
            known[type(module)] = _projections(model, name)
        put_(model, name, _apart(module, known[type(module)]))
    return list(found)


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """A model with its experts taken apart, and put together again at the end, however that comes."""
    take_apart_(model)
    try:
        yield
    finally:
        together_(model)


def together_(model: nn.Module) -> nn.Module:
    """Put what runs them in the place of experts that were taken apart, and give the model.

    Experts whose layers differ, or are of kinds without grouped products, stay as they are.
    """
    # Names alone, so that what is replaced is released.
    for name in [name for name, module in model.named_modules() if isinstance(module, ExpertLinears) and name]:
        settle_(model, name)
    return model


def release_(model: nn.Module) -> None:
    """Let go of the float weights of experts that are apart and of which some layers are quantised."""
    for module in model.modules():
        if isinstance(module, ExpertLinears) and not _is_float(module):
            module.__dict__.pop(_BEFORE, None)


def settle_(model: nn.Module, name: str) -> None:
    """Put what runs them in the place of the experts of this name, if they are apart and can be run together."""
    module = model.get_submodule(name)
    if isinstance(module, ExpertLinears):
        whole = GatedExperts.from_linears(module) or _as_before(module)
        if whole is not None:
            put_(model, name, whole)


def named_layers(model: nn.Module, device: str | None = "meta") -> Iterator[tuple[str, nn.Module]]:
    """A model's modules by name, ``GatedExperts`` as the linear layers that they stand for.

    Those have no values on "meta", and all values if `device` is None.
    """
    for name, module in model.named_modules():
        if isinstance(module, GatedExperts):
            yield from ((f"{name}.{layer}" if name else layer, linear) for layer, linear in module.linears(device))
        elif not isinstance(_parent(model, name), GatedExperts):
            yield name, module


def file_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict as files have it: of quantised layers their `file_state`."""
    state: dict[str, Tensor] = model.state_dict()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (GatedExperts, StoredTensors)) and not isinstance(_parent(model, name), GatedExperts):
            prefix = f"{name}." if name else ""
            own = [key for key in state if key.startswith(prefix)]
            stored = {f"{prefix}{part}": tensor for part, tensor in module.file_state().items()}
            state = {key: tensor for key, tensor in state.items() if key not in own} | stored
    return state


def _count(module: nn.Module) -> int:
    """How many experts a module holds; 0 if it holds none."""
    if isinstance(module, (ExpertLinears, GatedExperts)):
        return module.experts
    # Weights of convolutions, and packed ones, have three dimensions too.
    if isinstance(module, StoredTensors) or type(module).__module__.startswith("torch.nn."):
        return 0
    shapes = [tuple(p.shape) for p in module.parameters(recurse=False) if p.ndim == 3 and p.dtype in FLOAT_DTYPES]
    shapes = [shape for shape in shapes if min(shape) > 1]
    named = {value for key, value in vars(module).items() if "expert" in key and type(value) is int}
    stacks = [shape[0] for shape in shapes if shape[0] in named or any(_follows(shape, other) for other in shapes)]
    return next(iter(stacks), 0)


def _follows(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether stacks of as many matrices can be an expert's two layers: out of a width and back, gated or not.

    Heads of attention are stacked as well (XLNet's ``[hidden, heads, width]``), but all alike, so shapes that are
    equal tell nothing.
    """
    if first[0] != second[0] or first == second:
        return False
    (a, b), (c, d) = first[1:], second[1:]
    return (a == d and (b in (c, 2 * c) or c == 2 * b)) or (b == c and (a in (d, 2 * d) or d == 2 * a))


def _parent(model: nn.Module, name: str) -> nn.Module | None:
    return model.get_submodule(name.rpartition(".")[0]) if name else None


def put_(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a module under every name that it has: layers may share their experts."""
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for leaf in [leaf for leaf, child in parent._modules.items() if child is old]:
            setattr(parent, leaf, module)


def _stacked(module: Any) -> tuple[str, str]:
    """The names of the parameters of experts that can be taken apart."""
    return _GATE_UP if getattr(module, "has_gate", True) else _UP, _DOWN


def _in_one(module: nn.Module) -> int:
    """How many matrices of an expert the first of these parameters holds."""
    return 2 if _stacked(module)[0] == _GATE_UP else 1


def _matrices(module: Any) -> list[Tensor]:
    """The values of these parameters, ``[E, N, K]`` each."""
    found = [module.get_parameter(name).data for name in _stacked(module)]
    return [values.mT if module.is_transposed else values for values in found]


def _act_fn(module: Any) -> nn.Module:
    """What gates. Raises ValueError for what cannot be."""
    usual = type(module)._apply_gate.__module__ == "transformers.integrations.moe"
    found: nn.Module = module.act_fn if usual or _in_one(module) == 1 else OwnGate(module)
    return found


def _apart(module: nn.Module, projections: Projections) -> ExpertLinears:
    first, down = _matrices(module)
    experts = []
    for matrices, last in zip(first, down, strict=True):
        layers = map(_linear, (*matrices.chunk(_in_one(module)), last))
        experts.append(dict(zip(projections.names, layers, strict=True)))
    made = ExpertLinears(experts, _act_fn(module)).train(module.training)
    made.__dict__[_BEFORE] = module
    return made


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


@torch.no_grad()
def _as_before(linears: ExpertLinears) -> nn.Module | None:
    """The module that was taken apart, with the weights that its layers now have; None if any is quantised."""
    before: nn.Module | None = linears.__dict__.get(_BEFORE)
    if before is None or not _is_float(linears):
        return None
    parts = [[cast(Tensor, layer.weight) for layer in linears.layers(e)] for e in range(linears.experts)]
    old = {before.get_parameter(name).untyped_storage().data_ptr() for name in _stacked(before)}
    if any(weight.untyped_storage().data_ptr() not in old for each in parts for weight in each):
        first = torch.stack([torch.cat(each[:-1]) for each in parts])
        down = torch.stack([each[-1] for each in parts])
        for name, tensor in zip(_stacked(before), (first, down), strict=True):
            values = tensor.mT.contiguous() if cast(Any, before).is_transposed else tensor
            setattr(before, name, nn.Parameter(values, requires_grad=False))
    return before


def _is_float(linears: ExpertLinears) -> bool:
    return all(type(layer) is nn.Linear for expert in range(linears.experts) for layer in linears.layers(expert))


def _projections(model: nn.Module, name: str) -> Projections:
    """The names of an expert's matrices in files that transformers would save; its usual ones where it stacks them."""
    module: Any = model.get_submodule(name)
    usual = Projections() if _in_one(module) == 2 else Projections("")
    if not hasattr(model, "save_pretrained"):
        return usual
    from transformers.core_model_loading import revert_weight_conversion

    # Of two experts, so that the numbers of matrices and not of experts tell which is which.
    first = torch.tensor([[[0.0], [1.0]][-_in_one(module) :]] * 2, device="cpu")
    down = torch.full((2, 1, 1), 2.0, device="cpu")
    stacks = {f"{name}.{part}": values for part, values in zip(_stacked(module), (first, down), strict=True)}
    if module.is_transposed:
        stacks = {part: values.mT.contiguous() for part, values in stacks.items()}
    reverted = revert_weight_conversion(cast(Any, model), stacks)
    found: dict[float, str] = {0.0: ""} if _in_one(module) == 1 else {}
    for key, tensor in reverted.items():
        matched = re.fullmatch(r".*\.1\.(\w+)\.weight", key)
        if matched and tensor.numel() == 1:
            found[tensor.item()] = matched[1]
    return Projections(found[0.0], found[1.0], found[2.0]) if found.keys() == {0.0, 1.0, 2.0} else usual
