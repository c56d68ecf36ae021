"""Check a checkpoint's tensors against a transformers model, which may rename some."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.names import Names
from epiloq.formats.layouts.base import FormatError


def check(model: Any, checkpoint: Checkpoint) -> None:
    """Raise FormatError, which names the tensor, unless a checkpoint contains all tensors of a model.

    Unexpected tensors are reported by transformers itself.
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
    # A tensor may be tied to one that is tied to another.
    for _ in model.all_tied_weights_keys:
        more = {name for tie in model.all_tied_weights_keys.items() if not given.isdisjoint(tie) for name in tie}
        if more <= given:
            break
        given |= more
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    for name in sorted(names.state.keys() - given):
        if not any(pattern.search(name) for pattern in optional):
            raise FormatError(f"{checkpoint.folder}: {name}: expected a tensor, found none")
