"""Checkpoints of epiloq's own format in vLLM: ``quantization="epiloq"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    QKVParallelLinear,
    ReplicatedLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import BasevLLMParameter

from epiloq.formats.epiloq_modules import METHOD, Group
from epiloq.integrations.engines.parts import Part, PartsLinear, layers_by_name
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES

_QKV = ("q", "k", "v")


class EpiloqConfig(QuantizationConfig):
    """What a directory of epiloq's own format says of its layers, each by the name that it has in the model."""

    def __init__(self, layers: Mapping[str, Group]) -> None:
        super().__init__()
        self.layers = dict(layers)

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
        """None beside config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EpiloqConfig:
        return cls(layers_by_name(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Files name the format, and no method, so that what does not know it refuses them."""
        ours = hf_quant_cfg.get("format") == METHOD and hf_quant_cfg.get("quant_method") in (None, "", METHOD)
        return METHOD if ours and user_quant in (None, METHOD) else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        names = list(self.layers)
        self.layers = dict(zip(hf_to_vllm_mapper.apply_list(names), self.layers.values(), strict=True))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a linear layer; None for other layers, which stay as they are.

        Raises ValueError for quantised layers of other kinds: experts, embeddings, output heads.
        """
        if isinstance(layer, LinearBase):
            names = self.names(prefix)
            groups = [self.layers.get(name) for name in names]
            return UnquantizedLinearMethod() if not any(groups) else EpiloqLinearMethod(names, groups)
        inside = [name for name in self.layers if name == prefix or name.startswith(f"{prefix}.")]
        if inside:
            raise ValueError(
                f"epiloq: {inside[0]}: expected quantised linear layers alone, for vLLM runs this one as "
                f"{type(layer).__name__}; quantise the model anew with --ignore {inside[0]}"
            )
        return None

    def names(self, prefix: str) -> list[str]:
        """The names in the checkpoint of the parts of a layer that vLLM may have merged."""
        parent, _, leaf = prefix.rpartition(".")
        apart = self.packed_modules_mapping.get(leaf, [leaf])
        if prefix in self.layers:
            return [prefix]
        return [f"{parent}.{name}" if parent else name for name in apart]


@register_weight_loader_v2_supported_method
class EpiloqLinearMethod(LinearMethodBase):
    """A linear layer, of one part or several, each with its own kind."""

    def __init__(self, names: list[str], groups: list[Group | None]) -> None:
        self.names, self.groups = names, groups

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        count = len(output_partition_sizes)
        if len(self.names) not in (1, count):
            raise ValueError(f"epiloq: {layer.prefix}: expected {count} layers, got {', '.join(self.names)}")
        first = layer.tp_rank * input_size_per_partition if input_size_per_partition != input_size else 0
        columns = (first, first + input_size_per_partition)
        several = len(self.names) == count
        self.parts = [
            Part(self.names[i if several else 0], self.groups[i if several else 0], columns, input_size)
            for i in range(count)
        ]
        self.sizes, self.dtype = output_partition_sizes, params_dtype
        load = self.loader(layer, extra_weight_attrs["weight_loader"])
        self.stored = sorted({name for part in self.parts for name in part.rules})
        for name in self.stored:
            layer.register_parameter(name, StoredParameter(name, self.parts, self.sizes, load))

    def loader(self, layer: Any, given: Callable[..., None]) -> Callable[..., None]:
        """The engine's loader; but for replicated layers, and files that hold merged layers as one."""

        def load(parameter: StoredParameter, tensor: Tensor, shard: Any = None) -> None:
            if isinstance(shard, (int, str)):
                given(parameter, tensor, shard)
            elif len(self.sizes) == 1 and not isinstance(layer, ReplicatedLinear):
                given(parameter, tensor)
            else:
                self.load_together(layer, parameter, tensor, shard)

        return load

    def load_together(
        self, layer: Any, parameter: StoredParameter, tensor: Tensor, shard: tuple[int, ...] | None
    ) -> None:
        """Load a tensor of a layer that the files hold merged."""
        sizes, replicas = list(layer.output_partition_sizes), [1] * len(self.sizes)
        whole = [size * layer.tp_size for size in sizes]
        if isinstance(layer, QKVParallelLinear):
            replicas = [1, layer.num_kv_head_replicas, layer.num_kv_head_replicas]
            whole = [size // copies for size, copies in zip(whole, replicas, strict=True)]
        elif isinstance(layer, ReplicatedLinear):
            whole = sizes
        first = 0
        for index in range(len(sizes)) if shard is None else shard:
            rank = 0 if isinstance(layer, ReplicatedLinear) else layer.tp_rank // replicas[index]
            start = first + rank * sizes[index]
            parameter.take(index, tensor, start, sizes[index])
            first += whole[index]

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in self.stored:
            delattr(layer, name)
        layer.epiloq = PartsLinear(self.parts, self.dtype)
        del self.parts

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return layer.epiloq(x, bias)


class StoredParameter(BasevLLMParameter):
    """A tensor by its name in files, for each part of a layer; it holds nothing itself."""

    def __new__(cls, *arguments: Any) -> StoredParameter:
        return super().__new__(cls, data=torch.empty(0))

    def __init__(self, name: str, parts: list[Part], sizes: list[int], load: Callable[..., None]) -> None:
        super().__init__(data=torch.empty(0), weight_loader=load)
        self.stored_name, self.parts, self.sizes = name, parts, sizes

    def take(self, index: int, tensor: Tensor, first: int, size: int) -> None:
        """Keep `size` rows from the one on that is `first`, for a part."""
        self.parts[index].take(self.stored_name, tensor, (first, first + size), self.device)

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        self.take(0, loaded_weight, self.tp_rank * self.sizes[0], self.sizes[0])

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        self.take(0, loaded_weight, 0, self.sizes[0])

    def load_merged_column_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        size = given["shard_size"]
        self.take(given["shard_id"], loaded_weight, self.tp_rank * size, size)

    def load_qkv_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        index, size = _QKV.index(given["shard_id"]), given["shard_size"]
        rank = self.tp_rank if index == 0 else self.tp_rank // given["num_heads"]
        self.take(index, loaded_weight, rank * size, size)


def register() -> None:
    """Make ``quantization="epiloq"`` known; it may be called any number of times."""
    register_quantization_config(METHOD)(EpiloqConfig)
