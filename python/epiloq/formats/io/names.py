"""Names of the tensors of files in a model of transformers, where some differ."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from epiloq.formats.io.checkpoint import split_name
from epiloq.nn import ExpertLinears


class Names:
    """What the tensors of files are called in a model."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = without_stacking(get_model_conversion_mapping(model), apart(model))
        self.renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self.converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self.prefix, self.state = model.base_model_prefix, model.state_dict()

    def of(self, name: str) -> str:
        """The name in the model of a tensor that becomes one tensor there."""
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(name, self.renamings, [], self.prefix, self.state)[0]

    def targets(self, name: str) -> tuple[list[str], bool]:
        """The names in the model of what a tensor becomes, or becomes part of, and whether it is merely renamed."""
        from transformers.core_model_loading import rename_source_key

        found, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.state)
        if pattern is None:
            # As transformers does: a renaming that leads nowhere was not meant for this name.
            return [found if found in self.state else name], True
        converter = next(each for each in self.converters if pattern in each.source_patterns)
        first, *others = converter.target_patterns
        return [found, *(found.replace(first, other) for other in others)], False

    def converted(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors that one of transformers' converters makes of those of files, given by their names there.

        All are of one converter, and of one place in the model.
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
        """Names in the model by those of files; tensors of a quantised layer go with its weight, others keep theirs."""
        found = {}
        for name in stored:
            layer, part = split_name(name)
            weight, whole = self.of(f"{layer}.weight"), self.of(name)
            if whole in self.state:
                found[name] = whole
            else:
                found[name] = f"{weight.removesuffix('weight')}{part}" if weight in self.state else name
        return found


def named_in(model: nn.Module, layer: str) -> str:
    """What a layer of files is called in a model of transformers, whether or not the model has it."""
    if not hasattr(model, "base_model_prefix"):
        return layer
    return Names(model).of(f"{layer}.weight").removesuffix(".weight")


def apart(model: nn.Module) -> list[str]:
    """The names of the weights of experts that are apart: those of each stack's first expert, as files name them."""
    stacks = [(name, module.projections) for name, module in model.named_modules() if isinstance(module, ExpertLinears)]
    return [f"{name}.0.{projection}.weight" for name, projections in stacks for projection in projections.names]


def without_stacking(transforms: list[Any], names: list[str]) -> list[Any]:
    """Of transformers' changes to what it loads, those that stack none of the tensors of these names."""
    from transformers.core_model_loading import WeightConverter

    def stacks(transform: Any) -> bool:
        return isinstance(transform, WeightConverter) and any(
            transform.rename_source_key(name)[1] is not None for name in names
        )

    return [transform for transform in transforms if not stacks(transform)]


def saved_by_layer(model: Any, names: list[str]) -> list[Any]:
    """The changes that transformers undoes as it saves a model, but for those that merge tensors of these names.

    It keeps as one tensor in its files what some models have as several layers (query, key and value), and would join
    their packed integers as if they were rows of a float weight. Under their own names, it loads them as they are.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    known: list[Any] | None = getattr(model, "_weight_conversions", None)
    if known is None:  # As transformers has it for models that no directory was loaded into.
        found = get_model_conversion_mapping(model, add_legacy=False)
        known = [transform for transform in found if not isinstance(transform, PrefixChange)]

    def merges(transform: Any) -> bool:
        if not isinstance(transform, WeightConverter):
            return False
        undone = transform.reverse_transform()
        return any(undone.rename_source_key(name)[1] is not None for name in names)

    return [transform for transform in known if not merges(transform)]
