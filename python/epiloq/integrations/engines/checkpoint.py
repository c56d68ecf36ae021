"""epiloq's own format in engines: base classes of the classes registered with vLLM and SGLang; imports neither.

Both engines have the same interface (SGLang's came from vLLM's): a configuration that gives each layer its method, a
method that creates a layer's parameters and runs it, and parameters that select the rank's rows of a loaded tensor.
Subclasses add the differences: how to get the rank, and how merged layers are declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from epiloq.formats.epiloq_modules import METHOD, Group
from epiloq.integrations.engines.parts import Part, PartsLinear
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES

QKV = ("q", "k", "v")


class FormatConfig:
    """The layers of a directory in epiloq's own format, by their names in the model."""

    engine: ClassVar[str]
    layers: dict[str, Group]
    packed_modules_mapping: Any  # merged layer: the layers in the checkpoint

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return list(FLOAT_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None besides config.json."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Files name a format but no method, so that software without support refuses them."""
        ours = hf_quant_cfg.get("format") == METHOD and hf_quant_cfg.get("quant_method") in (None, "", METHOD)
        return METHOD if ours and user_quant in (None, METHOD) else None

    def parts(self, prefix: str) -> tuple[list[str], list[Group | None]]:
        """The parts of a layer that the engine may have merged: their names in the checkpoint, and their kinds."""
        parent, _, leaf = prefix.rpartition(".")
        apart = self.packed_modules_mapping.get(leaf, [leaf])
        names = [prefix] if prefix in self.layers else [f"{parent}.{name}" if parent else name for name in apart]
        return names, [self.layers.get(name) for name in names]

    def check_not_quantised(self, layer: nn.Module, prefix: str) -> None:
        """Raise ValueError for a quantised layer that is not linear: experts, embeddings, output heads."""
        inside = [name for name in self.layers if name == prefix or name.startswith(f"{prefix}.")]
        if inside:
            raise ValueError(
                f"epiloq: {inside[0]}: expected only quantised linear layers, because {self.engine} runs this one as "
                f"{type(layer).__name__}; quantise the model again with --ignore {inside[0]}"
            )


class PartsMethod:
    """Runs a linear layer, of one part or several, each with its own kind."""

    parts: list[Part]
    sizes: list[int]  # rows of each part
    dtype: torch.dtype
    stored: list[str]  # names of the parameters while tensors are loaded

    def __init__(self, names: list[str], groups: list[Group | None]) -> None:
        self.names, self.groups = names, groups

    def prepare(
        self, where: str, columns: tuple[int, int], in_features: int, sizes: list[int], dtype: torch.dtype
    ) -> None:
        """Create the parts: a rank's `columns` of `in_features`, and rows by part. `where` begins error messages."""
        count = len(sizes)
        if len(self.names) not in (1, count):
            raise ValueError(f"epiloq: {where}expected {count} layers, got {', '.join(self.names)}")
        several = len(self.names) == count
        self.parts = [
            Part(self.names[i if several else 0], self.groups[i if several else 0], columns, in_features)
            for i in range(count)
        ]
        self.sizes, self.dtype = sizes, dtype
        self.stored = sorted({name for part in self.parts for name in part.rules})

    def loader(self, layer: Any, given: Callable[..., None], is_replicated: bool) -> Callable[..., None]:
        """The engine's loader, with support for replicated layers and for merged layers stored as one."""

        def load(parameter: Any, tensor: Tensor, shard: Any = None) -> None:
            if isinstance(shard, (int, str)):
                given(parameter, tensor, shard)
            elif len(self.sizes) == 1 and not is_replicated:
                given(parameter, tensor)
            else:
                for index, first in self.starts(layer, range(len(self.sizes)) if shard is None else shard):
                    parameter.take(index, tensor, first, self.sizes[index])

        return load

    def register(self, layer: Any, kind: Callable[..., Any], load: Callable[..., None]) -> None:
        """Give the layer a parameter of a kind of `StoredTensor` for each stored tensor."""
        for name in self.stored:
            layer.register_parameter(name, kind(name, self.parts, self.sizes, load))

    def starts(self, layer: Any, shards: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Parts of a layer that is stored merged, each with the index of the rank's first row in the tensor."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in self.stored:
            delattr(layer, name)
        layer.epiloq = PartsLinear(self.parts, self.dtype)
        del self.parts

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = layer.epiloq(x, bias)
        return result


class StoredTensor:
    """Receives a tensor, by its name in files, for each part of a layer; the parameter itself is empty.

    Subclasses add the engine's class of parameters behind this one.
    """

    stored_name: str
    parts: list[Part]
    sizes: list[int]
    device: torch.device

    def __new__(cls, *arguments: Any) -> Any:
        return super().__new__(cls, data=torch.empty(0))  # type: ignore[call-arg]

    def __init__(self, name: str, parts: list[Part], sizes: list[int], load: Callable[..., None]) -> None:
        super().__init__(data=torch.empty(0), weight_loader=load)  # type: ignore[call-arg]
        self.stored_name, self.parts, self.sizes = name, parts, sizes

    def take(self, index: int, tensor: Tensor, first: int, size: int) -> None:
        """Keep `size` rows from row `first` on, for a part."""
        self.parts[index].take(self.stored_name, tensor, (first, first + size), self.device)

    def rank_of(self, given: Mapping[str, Any]) -> int:
        """The rank within the layer's tensor-parallel group, from the engine's arguments to a loader."""
        raise NotImplementedError

    def load_column_parallel_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        self.take(0, loaded_weight, self.rank_of(given) * self.sizes[0], self.sizes[0])

    def load_row_parallel_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        self.take(0, loaded_weight, 0, self.sizes[0])

    def load_merged_column_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        size = given["shard_size"]
        self.take(given["shard_id"], loaded_weight, self.rank_of(given) * size, size)

    def load_qkv_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        index, size = QKV.index(given["shard_id"]), given["shard_size"]
        rank = self.rank_of(given) if index == 0 else self.rank_of(given) // given["num_heads"]
        self.take(index, loaded_weight, rank * size, size)
