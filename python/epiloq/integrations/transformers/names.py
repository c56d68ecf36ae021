"""A checkpoint's tensors against those of a model in transformers, which has names of its own for some."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from epiloq.formats.checkpoint import Checkpoint
from epiloq.formats.layouts import FormatError


class Names:
    """What the tensors of files are called in a model."""

    def __init__(self, model: Any) -> None:
        transforms = get_model_conversion_mapping(model)
        self.renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self.converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self.prefix, self.state = model.base_model_prefix, model.state_dict()

    def of(self, name: str) -> str:
        """The name in the model of a tensor that becomes one tensor there."""
        return rename_source_key(name, self.renamings, [], self.prefix, self.state)[0]

    def targets(self, name: str) -> tuple[list[str], bool]:
        """The names in the model of what a tensor becomes, or becomes part of, and whether it is merely renamed."""
        found, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.state)
        if pattern is None:
            # As transformers does: a renaming that leads nowhere was not meant for this name.
            return [found if found in self.state else name], True
        converter = next(each for each in self.converters if pattern in each.source_patterns)
        first, *others = converter.target_patterns
        return [found, *(found.replace(first, other) for other in others)], False


def check(model: Any, checkpoint: Checkpoint) -> None:
    """Raise FormatError, which names the tensor, unless a model finds all of its tensors in a checkpoint.

    Tensors that the model has no use for are left to transformers' own report.
    """
    names, given = Names(model), set[str]()
    for name, entry in checkpoint.entries.items():
        targets, renamed = names.targets(name)
        given.update(targets)
        target: Tensor | None = names.state.get(targets[0]) if renamed else None
        if target is not None and not entry.fits(target):
            raise FormatError(
                f"{checkpoint.where(name)}: expected {target.dtype} {list(target.shape)}, "
                f"got {entry.dtype} {list(entry.shape)}"
            )
    for one, other in model.all_tied_weights_keys.items():
        if one in given or other in given:
            given |= {one, other}
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    for name in sorted(names.state.keys() - given):
        if not any(pattern.search(name) for pattern in optional):
            raise FormatError(f"{checkpoint.folder}: {name}: expected a tensor, found none")
