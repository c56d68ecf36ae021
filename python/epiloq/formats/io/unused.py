"""Floating-point tensors of files that the model of config.json does not have."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from torch import nn

from epiloq.formats.io.architecture import has_no_use_for
from epiloq.formats.io.checkpoint import Checkpoint, split_name
from epiloq.formats.io.safetensors_file import DTYPES
from epiloq.formats.layouts.base import FormatError

_NAMED = 3
# How many layers predict further tokens, which transformers leaves aside.
_FURTHER = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def buffers_of(model: nn.Module) -> set[str]:
    """The last parts of the names of a model's buffers: files of older versions hold them, which it computes."""
    return {name.rpartition(".")[2] for name, _ in model.named_buffers()}


def check_unused(model: nn.Module, names: Collection[str], checkpoint: Checkpoint) -> None:
    """Warn of tensors that a model has no place for, by the names that it would give them.

    Raises FormatError for what would make another model of the files: tensors of further members of a list that the
    model has, as of more layers than config.json says, and of layers that have none of that name.
    """
    buffers = buffers_of(model)
    left = []
    for name in sorted(names):
        if has_no_use_for(model, name) or name.rpartition(".")[2] in buffers:
            continue
        found = _beyond(model, name)
        if found is not None:
            raise FormatError(
                f"{checkpoint.where(name)}: not a tensor of this model, whose {found[0]} has {found[1]} by "
                "config.json: expected the config.json that belongs to the files"
            )
        layer, part = split_name(name)
        if _is_leaf(model, layer) and not (part == "bias" and not bool(checkpoint.tensor(name).any())):
            kind = type(model.get_submodule(layer)).__name__
            raise FormatError(
                f"{checkpoint.where(name)}: not a tensor of this model, whose {layer} is a plain {kind}: expected a "
                "config.json that says what it is for (how layers are quantised, or that they have biases)"
            )
        left.append(name)
    if left:
        others = f" and {len(left) - _NAMED} others" if len(left) > _NAMED else ""
        warnings.warn(
            f"{checkpoint.folder}: left out, because {type(model).__name__} has no such tensors: "
            f"{', '.join(left[:_NAMED])}{others}",
            stacklevel=2,
        )


def check_types(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise FormatError for integers and FP8 in the place of a model's floating-point numbers: they need scales."""
    state = model.state_dict(keep_vars=True)
    for name, entry in checkpoint.entries.items():
        dtype, target = DTYPES[entry.dtype], state.get(name)
        wide = dtype.is_floating_point and dtype.itemsize > 1
        if not wide and (dtype.is_floating_point if target is None else target.is_floating_point()):
            raise FormatError(
                f"{checkpoint.where(name)}: expected numbers in floating point of 16 bits or more, got {entry.dtype}, "
                "but config.json does not say how layers are quantised"
            )


def _is_leaf(model: nn.Module, layer: str) -> bool:
    """Whether this is a layer that holds tensors and no others."""
    try:
        module = model.get_submodule(layer)
    except AttributeError:
        return False
    return bool(layer) and not list(module.children()) and bool(module._parameters)


def _beyond(model: nn.Module, name: str) -> tuple[str, int] | None:
    """The list, and its length, of which a tensor would belong to a member that is not there."""
    place, parts = model, name.split(".")
    for position, part in enumerate(parts):
        children = dict(place.named_children())
        if part in children:
            place = children[part]
            continue
        if not part.isdigit() or "0" not in children or int(part) < len(children) + _further(model):
            return None
        return ".".join(parts[:position]), len(children)
    return None


def _further(model: Any) -> int:
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    return sum(value for key in _FURTHER if isinstance(value := getattr(text, key, 0), int))
