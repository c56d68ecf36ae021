"""Checkpoints of epiloq's own format in SGLang: ``quantization="epiloq"``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers import linear, quantization
from sglang.srt.layers.parameter import BasevLLMParameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import nn

from epiloq.formats.epiloq_modules import METHOD, Group
from epiloq.integrations.engines.checkpoint import FormatConfig, PartsMethod, StoredTensor
from epiloq.integrations.engines.parts import layers_by_name

_MERGED: Mapping[str, list[str]] = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Merged layers, for models that do not declare them."""


class EpiloqConfig(FormatConfig, QuantizationConfig):
    """The layers of a directory in epiloq's own format, by their names in the model."""

    engine = "SGLang"

    def __init__(self, layers: Mapping[str, Group], merged: Mapping[str, list[str]]) -> None:
        super().__init__()
        self.layers = dict(layers)
        self.packed_modules_mapping = {**_MERGED, **merged}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EpiloqConfig:
        return cls(layers_by_name(config), config.get("packed_modules_mapping") or {})

    def get_scaled_act_names(self) -> list[str]:
        """None: activations are quantised by the layers."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a linear layer; None for other layers, which stay as they are.

        Raises ValueError for quantised layers of other kinds: experts, embeddings, output heads.
        """
        if not isinstance(layer, linear.LinearBase):
            return self.check_not_quantised(layer, prefix)
        names, groups = self.parts(prefix)
        return EpiloqLinearMethod(names, groups) if any(groups) else UnquantizedLinearMethod()


class EpiloqLinearMethod(PartsMethod, LinearMethodBase):
    """A linear layer, of one part or several, each with its own kind."""

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
        if getattr(layer, "use_presharded_weights", False):
            raise ValueError(f"epiloq: {self.names[0]}: expected whole weights in the files, not those of a rank")
        rank = get_group_rank_size(layer.tp_group)[0] if input_size_per_partition != input_size else 0
        columns = (rank * input_size_per_partition, (rank + 1) * input_size_per_partition)
        self.prepare("", columns, input_size, output_partition_sizes, params_dtype)
        load = self.loader(layer, extra_weight_attrs["weight_loader"], isinstance(layer, linear.ReplicatedLinear))
        self.register(layer, StoredParameter, load)

    def starts(self, layer: Any, shards: Sequence[int]) -> Iterator[tuple[int, int]]:
        groups = [None if isinstance(layer, linear.ReplicatedLinear) else layer.tp_group] * len(self.sizes)
        replicas = [1] * len(self.sizes)
        if isinstance(layer, linear.QKVParallelLinear):
            groups = [layer.tp_group, layer.kv_tp_group, layer.kv_tp_group]
            replicas = [1, layer.num_kv_head_replicas, layer.num_kv_head_replicas]
        first = 0
        for index in shards:
            size, (rank, ranks) = self.sizes[index], get_group_rank_size(groups[index])
            yield index, first + rank // replicas[index] * size
            first += size * ranks // replicas[index]


class StoredParameter(StoredTensor, BasevLLMParameter):
    """Receives a tensor, by its name in files, for each part of a layer; itself empty."""

    def rank_of(self, given: Mapping[str, Any]) -> int:
        rank: int = given["tp_rank"]
        return rank


def register() -> None:
    """Register ``quantization="epiloq"``; may be called any number of times."""
    tables = (quantization.BASE_QUANTIZATION_METHODS, quantization.QUANTIZATION_METHODS)
    for table in (*tables, quantization.CPU_QUANTIZATION_METHODS):
        table[METHOD] = EpiloqConfig
    if EpiloqLinearMethod.__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
        linear.WEIGHT_LOADER_V2_SUPPORTED.append(EpiloqLinearMethod.__name__)
