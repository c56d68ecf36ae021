"""Tensors that transformers converts on loading: several joined to one, or one split into several."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.names import Names
from epiloq.formats.io.safetensors_file import DTYPES, Entry
from epiloq.formats.layouts.base import FormatError


def convert_(checkpoint: Checkpoint, model: Any, names: Names) -> None:
    """Make a checkpoint return a model's tensors instead of the floating-point tensors from which transformers creates
    them.

    Integer and FP8 tensors are left unchanged, because they have a meaning only with their layer's other tensors.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, entry in checkpoint.entries.items():
        dtype = DTYPES[entry.dtype]
        if name in names.state or not dtype.is_floating_point or dtype.itemsize == 1:
            continue
        targets, is_renamed = names.targets(checkpoint.stored_name(name))
        if not is_renamed and names.state.keys() >= set(targets):
            groups.setdefault(tuple(targets), []).append(name)
    for made, sources in groups.items():
        _put(checkpoint, model, names, list(made), sources)


def _put(checkpoint: Checkpoint, model: Any, names: Names, targets: list[str], sources: list[str]) -> None:
    where, dtype = checkpoint.where(sources[0]), checkpoint.entries[sources[0]].dtype
    places = [(checkpoint.files[name], checkpoint.stored_name(name)) for name in sources]

    def computed(target: str) -> Tensor:
        tensors = {stored: checkpoint.read(file, stored) for file, stored in places}
        try:
            return names.converted(model, tensors)[target]
        except Exception as error:  # transformers' operations raise arbitrary errors for tensors that do not fit
            raise FormatError(f"{where}: transformers cannot convert it to {target}: {error}") from error

    for name in sources:
        del checkpoint.entries[name], checkpoint.files[name]
    for target in targets:
        wanted = names.state[target]
        nbytes = wanted.numel() * DTYPES[dtype].itemsize
        checkpoint.entries[target], checkpoint.files[target] = Entry(dtype, tuple(wanted.shape), nbytes), places[0][0]
        checkpoint.computed[target] = partial(computed, target)
