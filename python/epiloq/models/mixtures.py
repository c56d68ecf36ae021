"""Mixtures of experts in transformers models: unstacking into one matrix per expert for quantisers and files, and back.

transformers stores the experts of a layer as two stacked parameters, checkpoints one matrix per expert.
`unstacked_experts` replaces them by ``nn.ExpertLinears``, so that all code for ``nn.Linear`` also handles experts.
`restack_experts_` replaces these by ``nn.GatedExperts``, which runs them, or by the original module. The modules are
found by structure rather than by name, because transformers runs all classes of the same structure with the same
functions (its experts interface).
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

# Attributes of transformers' experts interface, and the values required for unstacking: the first two in every version,
# the others in versions that have them.
_MARKS = ("has_bias", "is_transposed")
_TRAITS = {
    "has_bias": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}
_GATE_UP, _UP, _DOWN = ("gate_up_proj", "up_proj", "down_proj")
# Attribute in which an unstacked module keeps the original one (not a child, so that its tensors are not counted).
_BEFORE = "before"


def stacked(model: nn.Module) -> dict[str, nn.Module]:
    """Modules, by name, with stacked expert matrices: three-dimensional parameters, outside of torch's own layers,
    whose first dimension is the module's number of experts, or two whose matrices can follow one another."""
    found = {name: module for name, module in model.named_modules() if _count(module)}
    return {name: module for name, module in found.items() if not isinstance(module, (ExpertLinears, GatedExperts))}


def reason_against(module: nn.Module) -> str | None:
    """Why stacked experts cannot be unstacked; None if they can."""
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


def experts_left_stacked(model: nn.Module) -> dict[str, str]:
    """Stacked modules, by name, that always stay in floating point, with the reason."""
    reasons = {name: reason_against(module) for name, module in stacked(model).items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Routers by name: siblings of experts, or their children, with one row per expert, or one row for a shared
    expert."""
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
    """The end of an error message: why an expert's layer does not exist, or an empty string."""
    for name, reason in experts_left_stacked(model).items():
        if layer.startswith(f"{name}."):
            return f", for {name} cannot be taken apart: {reason}"
    return ""


def unquantised_neighbours(model: nn.Module, quantised: Collection[str]) -> set[str]:
    """Floating-point modules other than linear layers whose matrices readers of a format might assume to be quantised:
    routers, and experts without quantised layers.
    """
    with_some = {name.rsplit(".", 2)[0] for name in quantised if name.count(".") > 1}
    apart = {name for name, module in model.named_modules() if isinstance(module, ExpertLinears)}
    return {*routers(model), *stacked(model), *(apart - with_some)}


@torch.no_grad()
def unstack_experts_(model: nn.Module, takes: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Replace stacked experts for which ``takes(name)`` by ``ExpertLinears`` that share their memory; returns their
    names. Matrices have the names under which transformers would save them.
    """
    found = {name: m for name, m in stacked(model).items() if name and takes(name) and reason_against(m) is None}
    known: dict[type[nn.Module], Projections] = {}
    for name, module in found.items():
        if type(module) not in known:
            known[type(module)] = _projections(model, name)
        replace_module_(model, name, _apart(module, known[type(module)]))
    return list(found)


@contextmanager
def unstacked_experts(model: nn.Module) -> Iterator[None]:
    """Unstack a model's experts, and stack them again at the end, also after errors."""
    unstack_experts_(model)
    try:
        yield
    finally:
        restack_experts_(model)


def restack_experts_(model: nn.Module) -> nn.Module:
    """Replace unstacked experts by the modules that run them; returns the model. Experts whose layers differ or have no
    grouped product stay unstacked.
    """
    # Names only, so that replaced modules are released.
    for name in [name for name, module in model.named_modules() if isinstance(module, ExpertLinears) and name]:
        restack_complete_experts_(model, name)
    return model


def release_float_experts_(model: nn.Module) -> None:
    """Release the float weights of unstacked experts with quantised layers."""
    for module in model.modules():
        if isinstance(module, ExpertLinears) and not _is_float(module):
            module.__dict__.pop(_BEFORE, None)


def restack_complete_experts_(model: nn.Module, name: str) -> None:
    """Replace the experts with this name by the module that runs them, if they are unstacked and can be run
    together."""
    module = model.get_submodule(name)
    if isinstance(module, ExpertLinears):
        whole = GatedExperts.from_linears(module) or _as_before(module)
        if whole is not None:
            replace_module_(model, name, whole)


def named_layers(model: nn.Module, device: str | None = "meta") -> Iterator[tuple[str, nn.Module]]:
    """A model's modules by name, with ``GatedExperts`` as the linear layers that they represent.

    These have no values if `device` is "meta", and are on their own device if it is None.
    """
    for name, module in model.named_modules():
        if isinstance(module, GatedExperts):
            yield from ((f"{name}.{layer}" if name else layer, linear) for layer, linear in module.linears(device))
        elif not isinstance(_parent(model, name), GatedExperts):
            yield name, module


def file_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict as stored in files, with the `file_state` of quantised layers."""
    state: dict[str, Tensor] = model.state_dict()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (GatedExperts, StoredTensors)) and not isinstance(_parent(model, name), GatedExperts):
            prefix = f"{name}." if name else ""
            own = [key for key in state if key.startswith(prefix)]
            stored = {f"{prefix}{part}": tensor for part, tensor in module.file_state().items()}
            state = {key: tensor for key, tensor in state.items() if key not in own} | stored
    return state


def _count(module: nn.Module) -> int:
    """Number of experts of a module; 0 if it has none."""
    if isinstance(module, (ExpertLinears, GatedExperts)):
        return module.experts
    # Convolution weights and packed weights also have three dimensions.
    if isinstance(module, StoredTensors) or type(module).__module__.startswith("torch.nn."):
        return 0
    shapes = [tuple(p.shape) for p in module.parameters(recurse=False) if p.ndim == 3 and p.dtype in FLOAT_DTYPES]
    shapes = [shape for shape in shapes if min(shape) > 1]
    named = {value for key, value in vars(module).items() if "expert" in key and type(value) is int}
    stacks = [shape[0] for shape in shapes if shape[0] in named or any(_follows(shape, other) for other in shapes)]
    return next(iter(stacks), 0)


def _follows(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether two stacks of equally many matrices can be an expert's two layers: to an inner width and back, gated or
    not. Attention heads may also be stacked (XLNet's ``[hidden, heads, width]``), but with equal shapes, so equal
    shapes do not qualify.
    """
    if first[0] != second[0] or first == second:
        return False
    (a, b), (c, d) = first[1:], second[1:]
    return (a == d and (b in (c, 2 * c) or c == 2 * b)) or (b == c and (a in (d, 2 * d) or d == 2 * a))


def _parent(model: nn.Module, name: str) -> nn.Module | None:
    return model.get_submodule(name.rpartition(".")[0]) if name else None


def replace_module_(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a module under all its names, because layers may share experts."""
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for leaf in [leaf for leaf, child in parent._modules.items() if child is old]:
            setattr(parent, leaf, module)


def _stacked(module: Any) -> tuple[str, str]:
    """The names of the parameters of experts that can be unstacked."""
    return _GATE_UP if getattr(module, "has_gate", True) else _UP, _DOWN


def _in_one(module: nn.Module) -> int:
    """Number of an expert's matrices in the first of these parameters."""
    return 2 if _stacked(module)[0] == _GATE_UP else 1


def _matrices(module: Any) -> list[Tensor]:
    """The values of these parameters, ``[E, N, K]`` each."""
    found = [module.get_parameter(name).data for name in _stacked(module)]
    return [values.mT if module.is_transposed else values for values in found]


def _act_fn(module: Any) -> nn.Module:
    """The gate's activation function. Raises ValueError for an unsupported one."""
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
    """The original module with the current weights of its layers; None if any is quantised."""
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
    """The names under which transformers would save an expert's matrices; its usual names if it stacks them."""
    module: Any = model.get_submodule(name)
    usual = Projections() if _in_one(module) == 2 else Projections("")
    if not hasattr(model, "save_pretrained"):
        return usual
    from transformers.core_model_loading import revert_weight_conversion

    # With two experts, so that matrices are distinguished by their own numbers rather than the experts'.
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
