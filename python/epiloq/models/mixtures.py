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

from epiloq.models.stacked_experts import (
    BEFORE,
    apart_from,
    as_before,
    declared,
    in_one,
    is_float,
    reason_against,
    stacked_names,
)
from epiloq.nn import ExpertLinears, GatedExperts
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES
from epiloq.nn.base.stored_tensors import StoredTensors
from epiloq.nn.experts.expert_linears import Projections


def stacked(model: nn.Module) -> dict[str, nn.Module]:
    """Modules, by name, with stacked expert matrices: three-dimensional parameters, outside of torch's own layers,
    whose first dimension is the module's number of experts (an attribute with "expert" in its name, or of a class
    with that in its name), or two whose matrices can follow one another; or several equal matrices with the rows of
    all experts."""
    found = {name: module for name, module in model.named_modules() if _count(module)}
    return {name: module for name, module in found.items() if not isinstance(module, (ExpertLinears, GatedExperts))}


def experts_left_stacked(model: nn.Module) -> dict[str, str]:
    """Stacked modules, by name, that always stay in floating point, with the reason."""
    reasons = {name: reason_against(module) for name, module in stacked(model).items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Routers by name: siblings of experts or their children, with one row per expert or one for a shared expert."""
    found = {}
    for name, module in model.named_modules():
        counts = {count for child in module.children() if (count := _count_in(child))}
        siblings = [(leaf, child) for leaf, child in module.named_children() if counts and not _count_in(child)]
        for leaf, child in siblings:
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
        replace_module_(model, name, apart_from(module, known[type(module)]))
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
        if isinstance(module, ExpertLinears) and not is_float(module):
            module.__dict__.pop(BEFORE, None)


def restack_complete_experts_(model: nn.Module, name: str) -> None:
    """Replace the experts of this name by the module that runs them, if they are unstacked and can run together."""
    module = model.get_submodule(name)
    if isinstance(module, ExpertLinears):
        whole = GatedExperts.from_linears(module) or as_before(module)
        if whole is not None:
            replace_module_(model, name, whole)


def named_layers(model: nn.Module, device: str | None = "meta") -> Iterator[tuple[str, nn.Module]]:
    """A model's modules by name, with ``GatedExperts`` as the linear layers that they represent.

    These have no values if `device` is "meta", and are on their own device if it is None. A module that the model
    has under several names comes under each.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, GatedExperts):
            yield from ((f"{name}.{layer}" if name else layer, linear) for layer, linear in module.linears(device))
        elif not isinstance(_parent(model, name), GatedExperts):
            yield name, module


def file_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict as stored in files, with the `file_state` of quantised layers.

    A quantised layer that the model has under several names has tensors of its own under each, so that files do not
    depend on whether the model shares modules or ties the weights of equal ones.
    """
    state: dict[str, Tensor] = model.state_dict()
    seen = set[int]()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (GatedExperts, StoredTensors)) and not isinstance(_parent(model, name), GatedExperts):
            prefix = f"{name}." if name else ""
            own = [key for key in state if key.startswith(prefix)]
            stored = {
                f"{prefix}{part}": tensor.clone() if id(module) in seen else tensor
                for part, tensor in module.file_state().items()
            }
            seen.add(id(module))
            state = {key: tensor for key, tensor in state.items() if key not in own} | stored
    return state


def _count(module: nn.Module) -> int:
    """Number of experts of a module; 0 if it has none."""
    if isinstance(module, (ExpertLinears, GatedExperts)):
        return module.experts + module.identities
    # Convolution weights and packed weights also have three dimensions.
    if isinstance(module, StoredTensors) or type(module).__module__.startswith("torch.nn."):
        return 0
    shapes = [tuple(p.shape) for p in module.parameters(recurse=False) if p.ndim == 3 and p.dtype in FLOAT_DTYPES]
    shapes = [shape for shape in shapes if min(shape) > 1]
    is_named = "expert" in type(module).__name__.lower()
    named = {n for key, n in vars(module).items() if type(n) is int and (is_named or "expert" in key)}
    stacks = [shape[0] for shape in shapes if shape[0] in named or any(_follows(shape, other) for other in shapes)]
    return next(iter(stacks), 0) or _joined(module)


def _joined(module: nn.Module) -> int:
    """Number of experts of a module if their matrices follow one another in the rows of several equal parameters
    (DBRX); otherwise 0."""
    shapes = [tuple(p.shape) for p in module.parameters(recurse=False) if p.ndim == 2 and p.dtype in FLOAT_DTYPES]
    if len(shapes) < 2 or len(set(shapes)) > 1:
        return 0
    sizes = {key: value for key, value in vars(module).items() if type(value) is int and value > 1}
    counts = [value for key, value in sizes.items() if "expert" in key]
    return next((count for count in counts if shapes[0][0] in {count * width for width in sizes.values()}), 0)


def _count_in(module: nn.Module) -> int:
    """Number of experts of a module, or of the only module in it."""
    children = list(module.children())
    only = len(children) == 1 and not list(module.parameters(recurse=False))
    return _count(module) or (_count(children[0]) if only else 0)


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


def _projections(model: nn.Module, name: str) -> Projections:
    """The names under which transformers would save an expert's matrices; its usual names if it stacks them."""
    module: Any = model.get_submodule(name)
    usual = Projections() if in_one(module) == 2 else Projections("")
    if not hasattr(model, "save_pretrained"):
        return usual
    from transformers.core_model_loading import revert_weight_conversion

    # With two experts, so that matrices are distinguished by their own numbers rather than the experts'.
    first = torch.tensor([[[0.0], [1.0]][-in_one(module) :]] * 2, device="cpu")
    down = torch.full((2, 1, 1), 2.0, device="cpu")
    stacks = {f"{name}.{part}": values for part, values in zip(stacked_names(module), (first, down), strict=True)}
    if declared(module, "is_transposed"):
        stacks = {part: values.mT.contiguous() for part, values in stacks.items()}
    reverted = revert_weight_conversion(cast(Any, model), stacks)
    found: dict[float, str] = {0.0: ""} if in_one(module) == 1 else {}
    for key, tensor in reverted.items():
        matched = re.fullmatch(r".*\.1\.(\w+)\.weight", key)
        if matched and tensor.numel() == 1:
            found[tensor.item()] = matched[1]
    return Projections(found[0.0], found[1.0], found[2.0]) if found.keys() == {0.0, 1.0, 2.0} else usual
