"""Experts of checkpoints in epiloq's own format in vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform

from epiloq.formats.epiloq_modules import Group
from epiloq.formats.layouts.base import FormatError
from epiloq.integrations.engines.experts import Sizes
from epiloq.integrations.engines.parts import Part
from epiloq.integrations.vllm.expert_offers import gate_of, reason_against_recording
from epiloq.integrations.vllm.experts import EpiloqRoutedExperts, ExpertsMethod, reason_against, settle
from epiloq.nn.experts.expert_linears import ExpertLinears
from epiloq.nn.experts.gated_experts import GatedExperts

_SHARDS = ("w1", "w3", "w2")
"""vLLM's names of gate, up and down."""


class EpiloqExpertsMethod(ExpertsMethod):
    """The experts of a rank, each matrix a layer of the checkpoint.

    names, groups
        By expert, over all ranks: the layers of gate, up and down, and their kind. Raises ValueError unless it is one
        kind for all, and for layers that vLLM runs in ways that epiloq does not.
    """

    def __init__(self, layer: Any, names: Sequence[Sequence[str]], groups: Sequence[Sequence[Group | None]]) -> None:
        super().__init__(layer.moe_config)
        first = groups[0][0]
        for each, kinds in zip(names, groups, strict=True):
            for name, group in zip(each, kinds, strict=True):
                if group is None or first is None or (group.module, group.options) != (first.module, first.options):
                    raise _unexpected(name, "all experts of a layer quantised alike", _described(group))
        reason = reason_against(layer, layer.moe_config)
        if reason is None and not isinstance(layer, EpiloqRoutedExperts):
            reason = f"expected vLLM's own layer of experts, got {type(layer).__name__}"
        if reason is not None:
            raise ValueError(f"epiloq: {names[0][0]}: {reason}")
        assert first is not None
        self.names, self.group = names, first

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.dtype, self.sizes = params_dtype, Sizes(num_experts, hidden_size, intermediate_size_per_partition)
        self._check_graphs()
        inner = self.moe.intermediate_size
        first = self.moe.tp_rank * self.sizes.intermediate
        own = (first, first + self.sizes.intermediate)
        # By shard: the rank's rows, its columns, and all columns.
        self.rows = {"w1": own, "w3": own, "w2": (0, hidden_size)}
        columns = {"w1": (0, hidden_size), "w3": (0, hidden_size), "w2": own}
        whole = {"w1": hidden_size, "w3": hidden_size, "w2": inner}
        self.parts: list[dict[str, Part]] = [{} for _ in range(num_experts)]
        for expert, names in enumerate(self.names):
            local = layer._map_global_expert_id_to_local_expert_id(expert)
            if local >= 0:
                self.parts[local] = {
                    shard: Part(name, self.group, columns[shard], whole[shard])
                    for shard, name in zip(_SHARDS, names, strict=True)
                }
        self.stored = sorted(self.parts[0]["w1"].rules)
        for name in (f"{matrix}_{stored}" for matrix in ("w13", "w2") for stored in self.stored):
            parameter = nn.Parameter(torch.empty(0), requires_grad=False)
            parameter.weight_loader = self._loader(layer)  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)

    def _check_graphs(self) -> None:
        """Raise ValueError if vLLM records CUDA graphs, and these experts cannot be recorded."""
        config = get_current_vllm_config_or_none()
        eager = config is not None and config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
        if eager or self.group.module not in ("WeightOnlyLinear", "W4A8Linear"):
            return
        options = self.group.options
        bits, group_size, zeros = options.get("bits", 4), options["group_size"], options["zeros"]
        dtype = torch.bfloat16 if self.group.module == "W4A8Linear" else self.moe.in_dtype
        reason = reason_against_recording(self.sizes, bits, group_size, dtype)
        if zeros == "offset" and current_platform.is_cuda():
            reason = "no kernel multiplies all experts with real offsets"
        if reason is not None:
            raise ValueError(
                f"epiloq: {self.names[0][0]}: expected experts that CUDA graphs can record, but {reason}; give vLLM "
                "--enforce-eager, or quantise the experts in groups of 128"
            )

    def _loader(self, layer: Any) -> Any:
        def load(
            param: Any,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if local >= 0:
                stored = weight_name.rpartition(".")[2].removeprefix("w13_").removeprefix("w2_")
                part = self.parts[local][shard_id]
                part.take(stored, loaded_weight, self.rows[shard_id], param.device)
            return local >= 0 if return_success else None

        return load

    def load_weights(self, layer: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Load tensors named like ``7.gate_proj.weight``, of any number of dimensions.

        vLLM's own function takes those of three for stacks of all experts. Raises FormatError for other names.
        """
        found = {
            name.removeprefix("experts."): (matrix.removeprefix("experts."), expert, shard)
            for matrix, name, expert, shard in layer.get_expert_mapping()
        }
        for name, tensor in weights:
            head, _, stored = name.rpartition(".")
            if f"{head}." not in found or stored not in self.stored:
                raise FormatError(f"{layer.layer_name}.{name}: expected of an expert {', '.join(self.stored)}")
            matrix, expert, shard = found[f"{head}."]
            parameter = f"{matrix}{stored}"
            if self._loader(layer)(getattr(layer, parameter), tensor, parameter, shard, expert, True):
                yield parameter

    def process_weights_after_loading(self, layer: Any) -> None:
        for part in (part for parts in self.parts for part in parts.values()):
            if part.window is not None and any(part.window.spare):
                got = f"outputs {part.window.rows} and inputs {part.columns}"
                raise _unexpected(part.name, "whole scale groups in each rank's part of an expert", got)
        experts = [
            {part.name.rpartition(".")[2]: part.module(self.dtype) for part in parts.values()} for parts in self.parts
        ]
        del self.parts
        module = GatedExperts.from_linears(ExpertLinears(experts, gate_of(layer)))
        if module is None:
            expected = "a scheme whose experts are multiplied together (docs/guide/moe.md)"
            raise _unexpected(self.names[0][0], expected, _described(self.group))
        settle(layer, module.eval())


def _described(group: Group | None) -> str:
    return "a layer in floating point" if group is None else f"{group.module} {dict(group.options)}"


def _unexpected(name: str, expected: str, got: str) -> ValueError:
    return ValueError(f"epiloq: {name}: expected {expected}, got {got}")
