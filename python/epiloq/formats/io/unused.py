"""Tensors of files in floating point that are no part of the model that config.json describes."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from torch import nn

from epiloq.formats.io.architecture import has_no_use_for
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layouts.base import FormatError

_NAMED = 3
# How many layers predict further tokens, which transformers leaves aside.
_FURTHER = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def buffers_of(model: nn.Module) -> set[str]:
    """The last parts of the names of a model's buffers: files of older versions hold them, which it computes."""
    return {name.rpartition(".")[2] for name, _ in model.named_buffers()}


def check_unused(model: nn.Module, names: Collection[str], checkpoint: Checkpoint) -> None:
    """Warn of tensors that a model has no place for, by the names that it would give them.

    Raises FormatError for those of further members of a list that the model has, as of more layers than config.json
    says: another model would come of the files.
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
        left.append(name)
    if left:
        others = f" and {len(left) - _NAMED} others" if len(left) > _NAMED else ""
        warnings.warn(
            f"{checkpoint.folder}: left out, for {type(model).__name__} has no such tensors: "
            f"{', '.join(left[:_NAMED])}{others}",
            stacklevel=2,
        )


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
