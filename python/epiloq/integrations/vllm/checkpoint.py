"""Checkpoints of epiloq's own format in vLLM: ``quantization="epiloq"``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
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
from epiloq.integrations.engines.checkpoint import FormatConfig, PartsMethod, StoredTensor
from epiloq.integrations.engines.parts import layers_by_name
from epiloq.integrations.vllm.checkpoint_experts import EpiloqExpertsMethod


class EpiloqConfig(FormatConfig, QuantizationConfig):
    """The layers of a directory in epiloq's own format, by their names in the model."""

    engine = "vLLM"

    def __init__(self, layers: Mapping[str, Group]) -> None:
        super().__init__()
        self.layers = dict(layers)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EpiloqConfig:
        return cls(layers_by_name(config))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a linear layer or of experts; None for other layers, which stay as they are.

        Raises ValueError for quantised layers of other kinds: embeddings, output heads, stacked experts.
        """
        if isinstance(layer, RoutedExperts):
            return self._method_of_experts(layer, prefix)
        if not isinstance(layer, LinearBase):
            return self.check_not_quantised(layer, prefix)
        names, groups = self.parts(prefix)
        return EpiloqLinearMethod(names, groups) if any(groups) else UnquantizedLinearMethod()

    def _method_of_experts(self, layer: Any, prefix: str) -> Any:
        projections = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
        prefix = self._experts(prefix, projections)
        names = [[f"{prefix}.{expert}.{name}" for name in projections] for expert in range(layer.global_num_experts)]
        groups = [[self.layers.get(name) for name in each] for each in names]
        if any(group is not None for each in groups for group in each):
            return EpiloqExpertsMethod(layer, names, groups)
        return self.check_not_quantised(layer, prefix)

    def _experts(self, prefix: str, projections: Sequence[str]) -> str:
        """What the configuration calls the experts that the files, and vLLM, call `prefix`.

        It has the names of transformers' modules, where the parent may have another one: Mixtral's block_sparse_moe is
        called mlp there.
        """
        above, _, leaf = prefix.rpartition(".")
        above = above.rpartition(".")[0]
        matrices = "|".join(map(re.escape, projections))
        pattern = re.compile(rf"({re.escape(above)}\.[^.]+\.{re.escape(leaf)})\.\d+\.(?:{matrices})")
        found = {match[1] for match in map(pattern.fullmatch, self.layers) if match}
        return found.pop() if len(found) == 1 else prefix


@register_weight_loader_v2_supported_method
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
        first = layer.tp_rank * input_size_per_partition if input_size_per_partition != input_size else 0
        columns = (first, first + input_size_per_partition)
        self.prepare(f"{layer.prefix}: ", columns, input_size, output_partition_sizes, params_dtype)
        load = self.loader(layer, extra_weight_attrs["weight_loader"], isinstance(layer, ReplicatedLinear))
        self.register(layer, StoredParameter, load)

    def starts(self, layer: Any, shards: Sequence[int]) -> Iterator[tuple[int, int]]:
        sizes, replicas = list(layer.output_partition_sizes), [1] * len(self.sizes)
        whole = [size * layer.tp_size for size in sizes]
        if isinstance(layer, QKVParallelLinear):
            replicas = [1, layer.num_kv_head_replicas, layer.num_kv_head_replicas]
            whole = [size // copies for size, copies in zip(whole, replicas, strict=True)]
        elif isinstance(layer, ReplicatedLinear):
            whole = sizes
        first = 0
        for index in shards:
            rank = 0 if isinstance(layer, ReplicatedLinear) else layer.tp_rank // replicas[index]
            yield index, first + rank * sizes[index]
            first += whole[index]


class StoredParameter(StoredTensor, BasevLLMParameter):
    """Receives a tensor, by its name in files, for each part of a layer; itself empty."""

    def rank_of(self, given: Mapping[str, Any]) -> int:
        rank: int = self.tp_rank
        return rank


def register() -> None:
    """Register ``quantization="epiloq"``; may be called any number of times."""
    register_quantization_config(METHOD)(EpiloqConfig)
