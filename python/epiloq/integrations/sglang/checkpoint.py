"""Checkpoints of epiloq's own format in SGLang: ``quantization="epiloq"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers import linear, quantization
from sglang.srt.layers.parameter import BasevLLMParameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from epiloq.formats.epiloq_modules import METHOD, Group
from epiloq.integrations.engines.parts import Part, PartsLinear, layers_by_name
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES

_QKV = ("q", "k", "v")
_MERGED: Mapping[str, list[str]] = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Of models that do not say which layers they merge."""


class EpiloqConfig(QuantizationConfig):
    """What a directory of epiloq's own format says of its layers, each by the name that it has in the model."""

    def __init__(self, layers: Mapping[str, Group], merged: Mapping[str, list[str]]) -> None:
        super().__init__()
        self.layers = dict(layers)
        self.packed_modules_mapping = {**_MERGED, **merged}

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
        return cls(layers_by_name(config), config.get("packed_modules_mapping") or {})

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None) -> str | None:
        """Files name the format, and no method, so that what does not know it refuses them."""
        ours = hf_quant_cfg.get("format") == METHOD and hf_quant_cfg.get("quant_method") in (None, "", METHOD)
        return METHOD if ours and user_quant in (None, METHOD) else None

    def get_scaled_act_names(self) -> list[str]:
        """None: activations are quantised by the layers."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a linear layer; None for other layers, which stay as they are.

        Raises ValueError for quantised layers of other kinds: experts, embeddings, output heads.
        """
        if isinstance(layer, linear.LinearBase):
            parent, _, leaf = prefix.rpartition(".")
            apart = [f"{parent}.{name}" if parent else name for name in self.packed_modules_mapping.get(leaf, [leaf])]
            names = [prefix] if prefix in self.layers else apart
            groups = [self.layers.get(name) for name in names]
            return UnquantizedLinearMethod() if not any(groups) else EpiloqLinearMethod(names, groups)
        inside = [name for name in self.layers if name == prefix or name.startswith(f"{prefix}.")]
        if inside:
            raise ValueError(
                f"epiloq: {inside[0]}: expected quantised linear layers alone, for SGLang runs this one as "
                f"{type(layer).__name__}; quantise the model anew with --ignore {inside[0]}"
            )
        return None


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
            raise ValueError(f"epiloq: expected {count} layers, got {', '.join(self.names)}")
        if getattr(layer, "use_presharded_weights", False):
            raise ValueError(f"epiloq: {self.names[0]}: expected whole weights in the files, not those of a rank")
        rank = get_group_rank_size(layer.tp_group)[0] if input_size_per_partition != input_size else 0
        columns = (rank * input_size_per_partition, (rank + 1) * input_size_per_partition)
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
            elif len(self.sizes) == 1 and not isinstance(layer, linear.ReplicatedLinear):
                given(parameter, tensor)
            else:
                self.load_together(layer, parameter, tensor, shard)

        return load

    def load_together(
        self, layer: Any, parameter: StoredParameter, tensor: Tensor, shard: tuple[int, ...] | None
    ) -> None:
        """Load a tensor of a layer that the files hold merged."""
        groups = [None if isinstance(layer, linear.ReplicatedLinear) else layer.tp_group] * len(self.sizes)
        replicas = [1] * len(self.sizes)
        if isinstance(layer, linear.QKVParallelLinear):
            groups = [layer.tp_group, layer.kv_tp_group, layer.kv_tp_group]
            replicas = [1, layer.num_kv_head_replicas, layer.num_kv_head_replicas]
        first = 0
        for index in range(len(self.sizes)) if shard is None else shard:
            size, (rank, ranks) = self.sizes[index], get_group_rank_size(groups[index])
            parameter.take(index, tensor, first + rank // replicas[index] * size, size)
            first += size * ranks // replicas[index]

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

    def load_column_parallel_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        self.take(0, loaded_weight, given["tp_rank"] * self.sizes[0], self.sizes[0])

    def load_row_parallel_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        self.take(0, loaded_weight, 0, self.sizes[0])

    def load_merged_column_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        size = given["shard_size"]
        self.take(given["shard_id"], loaded_weight, given["tp_rank"] * size, size)

    def load_qkv_weight(self, loaded_weight: Tensor, **given: Any) -> None:
        index, size = _QKV.index(given["shard_id"]), given["shard_size"]
        rank = given["tp_rank"] if index == 0 else given["tp_rank"] // given["num_heads"]
        self.take(index, loaded_weight, rank * size, size)


def register() -> None:
    """Make ``quantization="epiloq"`` known; it may be called any number of times."""
    tables = (quantization.BASE_QUANTIZATION_METHODS, quantization.QUANTIZATION_METHODS)
    for table in (*tables, quantization.CPU_QUANTIZATION_METHODS):
        table[METHOD] = EpiloqConfig
    if EpiloqLinearMethod.__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
        linear.WEIGHT_LOADER_V2_SUPPORTED.append(EpiloqLinearMethod.__name__)
