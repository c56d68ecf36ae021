"""Mapping of tensor names in files to names in a transformers model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from epiloq.formats.io.checkpoint import Checkpoint, split_name
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import ExpertLinears


class Names:
    """Names of a model's tensors for those of files."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = without_stacking(get_model_conversion_mapping(model), unstacked_weights(model))
        self.renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self.converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self.prefix, self.state = model.base_model_prefix, model.state_dict()

    def of(self, name: str) -> str:
        """The name in the model of a tensor that becomes a single tensor there."""
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(name, self.renamings, [], self.prefix, self.state)[0]

    def has(self, name: str) -> bool:
        """Whether a tensor of files becomes a single tensor of the model."""
        return self.of(name) in self.state

    def targets(self, name: str) -> tuple[list[str], bool]:
        """The names of the model's tensors that a tensor becomes or becomes part of, and whether it is only renamed."""
        from transformers.core_model_loading import rename_source_key

        found, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.state)
        if pattern is None:
            # As in transformers: a renaming to a name that the model does not have does not apply.
            return [found if found in self.state else name], True
        converter = next(each for each in self.converters if pattern in each.source_patterns)
        first, *others = converter.target_patterns
        return [found, *(found.replace(first, other) for other in others)], False

    def check_distinct(self, checkpoint: Checkpoint) -> None:
        """Raise FormatError for two tensors of a checkpoint that become the same one of the model, such as one with and
        one without the prefix of the base model: which of them transformers uses is undefined."""
        taken = dict[tuple[str, ...], str]()
        for name in checkpoint.names():
            targets, renamed = self.targets(name)
            # A converter merges tensors whose names differ in more than the prefix.
            key = (*targets, *(() if renamed else (name.removeprefix(f"{self.prefix}."),)))
            if key in taken:
                raise FormatError(f"{checkpoint.where(name)}: is renamed to {targets[0]}, and so is {taken[key]}")
            taken[key] = name

    def converted(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors that a converter of transformers creates from tensors of files, given by their names
        there. All must belong to one converter and one layer of the model.
        """
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        made: Any = None
        first = ""
        for name, tensor in sorted(tensors.items(), key=lambda item: dot_natural_key(item[0])):
            first, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.state)
            made = made or copy.deepcopy(next(each for each in self.converters if pattern in each.source_patterns))
            made.add_tensor(first, name, pattern, tensor)
        found = made.convert(first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def by_stored(self, stored: Iterable[str]) -> dict[str, str]:
        """Names in the model by names in files. Tensors of a quantised layer are renamed with its weight, others keep
        their names."""
        found = {}
        for name in stored:
            layer, part = split_name(name)
            weight, whole = self.of(f"{layer}.weight"), self.of(name)
            if whole in self.state:
                found[name] = whole
            else:
                found[name] = f"{weight.removesuffix('weight')}{part}" if weight in self.state else name
        return found


def with_and_without_prefix(model: nn.Module, name: str) -> tuple[str, ...]:
    """A name with and without the prefix of a transformers base model, which only models with a head have."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix:
        return (name,)
    bare = name.removeprefix(f"{prefix}.")
    return f"{prefix}.{bare}", bare


def in_whole_model(model: nn.Module, name: str) -> str:
    """The name of a layer of a transformers model in the model with a head, for which a configuration may have been
    written: another one if `model` is a base model."""
    return name if hasattr(model, getattr(model, "base_model_prefix", "")) else with_and_without_prefix(model, name)[0]


def named_in(model: nn.Module, layer: str) -> str:
    """The name of a layer of files in a transformers model, whether or not the model has it."""
    if not hasattr(model, "base_model_prefix"):
        return layer
    return Names(model).of(f"{layer}.weight").removesuffix(".weight")


def unstacked_weights(model: nn.Module) -> list[str]:
    """Names in files of unstacked expert weights: those of each stack's first expert."""
    stacks = [(name, module.projections) for name, module in model.named_modules() if isinstance(module, ExpertLinears)]
    return [f"{name}.0.{projection}.weight" for name, projections in stacks for projection in projections.names]


def without_stacking(transforms: list[Any], names: list[str]) -> list[Any]:
    """transformers' weight conversions without those that stack tensors with these names."""
    from transformers.core_model_loading import WeightConverter

    def stacks(transform: Any) -> bool:
        return isinstance(transform, WeightConverter) and any(
            transform.rename_source_key(name)[1] is not None for name in names
        )

    return [transform for transform in transforms if not stacks(transform)]


def saved_by_layer(model: Any, names: list[str]) -> list[Any]:
    """The weight conversions that transformers reverts when it saves a model, without those that merge tensors with
    these names.

    Some models' files have one tensor for several layers (query, key and value). transformers would join packed
    integers as if they were rows of a float weight. Under their own names it loads them unchanged.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    known: list[Any] | None = getattr(model, "_weight_conversions", None)
    if known is None:  # transformers' default for models that were not loaded from a directory
        found = get_model_conversion_mapping(model, add_legacy=False)
        known = [transform for transform in found if not isinstance(transform, PrefixChange)]

    def merges(transform: Any) -> bool:
        if not isinstance(transform, WeightConverter):
            return False
        undone = transform.reverse_transform()
        return any(undone.rename_source_key(name)[1] is not None for name in names)

    return [transform for transform in known if not merges(transform)]
