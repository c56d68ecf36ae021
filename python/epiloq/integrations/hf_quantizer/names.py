"""Check a checkpoint's tensors against a transformers model, which may rename some."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor, nn

from epiloq.formats.io.architecture import ignores_tensor
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.names import Names
from epiloq.formats.io.unused import buffers_of, is_of_another_head, why_another_model
from epiloq.formats.layouts.base import FormatError


def check(model: Any, checkpoint: Checkpoint, unused: Collection[str]) -> None:
    """Raise FormatError, which names the tensor, unless a checkpoint contains all tensors of a model, each once, and
    none that indicates a different model, except `unused` ones and those of a head.

    Other unexpected tensors, and heads that it initialises, are reported by transformers itself.
    """
    names, given, unexpected = Names(model), set[str](), dict[str, str]()
    names.check_distinct(checkpoint)
    for name, entry in checkpoint.entries.items():
        targets, renamed = names.targets(name)
        given.update(targets)
        if names.state.keys().isdisjoint(targets) and name not in unused:
            unexpected[name] = targets[0]
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
        if not any(pattern.search(name) for pattern in optional) and not is_of_another_head(model, checkpoint, name):
            raise FormatError(f"{checkpoint.folder}: {name}: expected a tensor, found none")
    buffers = buffers_of(model)
    for name, own in unexpected.items():
        if own.rpartition(".")[2] in buffers or ignores_tensor(model, own):
            continue
        why = why_another_model(model, own, partial(checkpoint.tensor, name))
        if why:
            raise FormatError(f"{checkpoint.where(name)}: {why}")


def layers_without_tensors(model: Any, checkpoint: Checkpoint) -> dict[str, type[nn.Module]]:
    """A model's linear layers of which a checkpoint has no weight, not even a tied one, and which transformers
    therefore initialises, with their classes."""
    names = Names(model)
    given = {names.of(name) for name in checkpoint.entries}.union(*model.all_tied_weights_keys.items())
    return {
        name: type(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"{name}.weight" not in given
    }
