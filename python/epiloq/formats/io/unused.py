"""Floating-point tensors of files that the model does not have."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn

from epiloq.formats.configs.keys import misspelled
from epiloq.formats.io.architecture import has, ignores_tensor, is_missing_in_saved, submodule
from epiloq.formats.io.checkpoint import Checkpoint, split_name
from epiloq.formats.io.described import KEY
from epiloq.formats.io.safetensors_file import DTYPES
from epiloq.formats.layouts.base import FormatError

_NAMED = 3
# Keys for the number of multi-token prediction layers, which transformers ignores.
_FURTHER = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def buffers_of(model: nn.Module) -> set[str]:
    """The last parts of the names of a model's buffers, which are computed but may be in older files."""
    return {name.rpartition(".")[2] for name, _ in model.named_buffers()}


def check_unused(model: nn.Module, names: Collection[str], checkpoint: Checkpoint) -> None:
    """Warn of tensors, by their names in the model, that a model does not have.

    Raises FormatError for tensors that indicate a different model: those of further members of a list (such as more
    layers than config.json states), and unknown tensors of known layers.
    """
    buffers = buffers_of(model)
    left = []
    for name in sorted(names):
        if ignores_tensor(model, name) or name.rpartition(".")[2] in buffers:
            continue
        why = why_another_model(model, name, partial(checkpoint.tensor, name))
        if why:
            raise FormatError(f"{checkpoint.where(name)}: {why}")
        left.append(name)
    if left:
        others = f" and {len(left) - _NAMED} others" if len(left) > _NAMED else ""
        warnings.warn(
            f"{checkpoint.folder}: left out, because {type(model).__name__} has no such tensors: "
            f"{', '.join(left[:_NAMED])}{others}",
            stacklevel=2,
        )


def why_another_model(model: nn.Module, name: str, read: Callable[[], Tensor]) -> str:
    """The end of an error message: why a tensor that a model lacks, by its name there, indicates a different model, or
    an empty string. A bias is read, because one of zeros changes nothing.
    """
    found = _beyond(model, name)
    if found is not None:
        return (
            f"not a tensor of this model, whose {found[0]} has {found[1]} by config.json: expected the config.json "
            "that belongs to the files"
        )
    layer, part = split_name(name)
    if _is_leaf(model, layer) and (part != "bias" or bool(read().any())):
        return (
            f"not a tensor of this model, whose {layer} is a plain {type(model.get_submodule(layer)).__name__}: "
            "expected a config.json that says what it is for (how layers are quantised, or that they have biases)"
        )
    return ""


def is_computed(model: nn.Module, name: str, tensor: Tensor) -> bool:
    """Whether files may lack a constant of a transformers model, which the model itself computes, such as the sines of
    Marian's positions. Files never lack a trained parameter, even where transformers would fill it with random values.
    """
    patterns: Collection[str] = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return not tensor.requires_grad and any(re.search(pattern, name) for pattern in patterns)


def ignores_layer(model: nn.Module, layer: str) -> bool:
    """Whether files may have a layer that a transformers model does not have, and that nothing uses."""
    return ignores_tensor(model, layer) or is_expected(model, layer)


def is_of_another_head(model: Any, checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor or layer, by its name in a transformers model, belongs to a head that only one of the model and
    the saved one has, because they are of different classes: a classifier opened from a language model's files, whose
    output head it does not need and whose own head transformers initialises.

    A head is what is outside the base model, and entirely in the model or entirely in the files; or a part of the base
    model that the saved class has not, such as a pooler. Language models never lack theirs: a random one predicts
    random tokens.
    """
    saved = checkpoint.config.get("architectures")
    if not isinstance(saved, list) or not saved or type(model).__name__ in saved:
        return False
    prefix = model.base_model_prefix
    if not has(model, prefix):  # A base model: in files of one with a head its own tensors have the prefix.
        name = name.removeprefix(f"{prefix}.")
    head = name.partition(".")[0]
    if not has(model, head):
        return True
    base, output = model.base_model_prefix, model.get_output_embeddings()
    if not has(model, base) or head == base:
        part = name.removeprefix(f"{base}.").partition(".")[0]
        return is_missing_in_saved(model, checkpoint, part)
    inside = any(file.partition(".")[0] == head for file in checkpoint.files)
    return not inside and (output is None or getattr(model, head) is not output)


def check_types(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise FormatError for integer or FP8 tensors of floating-point parameters, or in their place: only a
    ``quantization_config`` could say what they mean."""
    state = model.state_dict(keep_vars=True)
    for name, entry in checkpoint.entries.items():
        dtype, target = DTYPES[entry.dtype], state.get(name)
        weight = f"{split_name(name)[0]}.weight"
        instead = target is None and weight in state and weight not in checkpoint.entries
        is_number = (dtype if target is None else target.dtype).is_floating_point
        if not entry.is_float and (instead or is_number):
            others = checkpoint.config.keys() - {KEY}
            near = [f" ({key}: expected {meant})" for key in sorted(others) if (meant := misspelled(key, (KEY,)))]
            raise FormatError(
                f"{checkpoint.where(name)}: expected numbers in floating point of 16 bits or more, got {entry.dtype}, "
                f"but config.json does not say how layers are quantised{''.join(near)}"
            )


def _is_leaf(model: nn.Module, layer: str) -> bool:
    """Whether this module has tensors but no submodules."""
    module = submodule(model, layer) if layer else None
    return module is not None and not list(module.children()) and bool(module._parameters)


def _beyond(model: nn.Module, name: str) -> tuple[str, int] | None:
    """The module list, and its length, to a missing member of which a tensor would belong."""
    found = _missing_member(model, name)
    return None if found is None or is_expected(model, name) else (found[0], found[2])


def is_expected(model: nn.Module, name: str) -> bool:
    """Whether a tensor belongs to a missing member of a list that files may have in addition: layers for multi-token
    prediction, by config.json, and experts that return their tokens.
    """
    found = _missing_member(model, name)
    if found is None:
        return False
    holder, index, count = found
    return index < count + _further(model, count) + int(getattr(model.get_submodule(holder), "identities", 0))


def _missing_member(model: nn.Module, name: str) -> tuple[str, int, int] | None:
    """The module list, a missing member of which a tensor would belong to: its name, the index, and its length."""
    place, parts = model, name.split(".")
    for position, part in enumerate(parts):
        children = dict(place.named_children())
        if part not in children:
            is_member = part.isdecimal() and ("0" in children or isinstance(place, nn.ModuleList))
            return (".".join(parts[:position]), int(part), sum(map(str.isdecimal, children))) if is_member else None
        place = children[part]
    return None


def _further(model: Any, count: int) -> int:
    """The number of layers for multi-token prediction that may follow a list of so many members."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    if getattr(text, "num_hidden_layers", None) != count:
        return 0
    return sum(value for key in _FURTHER if isinstance(value := getattr(text, key, 0), int))
