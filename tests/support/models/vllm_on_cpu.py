"""vLLM's own layers on a CPU: its platform, its configuration, and any number of ranks that need no processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
platforms = pytest.importorskip("vllm.platforms")
# Wheels for CUDA find no platform on a machine without a GPU. Modules bind it as they are imported.
if not torch.cuda.is_available():
    platforms._current_platform = pytest.importorskip("vllm.platforms.cpu").CpuPlatform()

pytest.importorskip("vllm.model_executor.layers.linear")
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

DTYPE = torch.bfloat16
EXPERTS = "model.layers.0.mlp.experts"


@contextmanager
def engine(
    rank: int = 0, ranks: int = 1, dtype: torch.dtype = DTYPE, expert_parallel: bool = False
) -> Iterator[VllmConfig]:
    """What layers ask for when they are made: the configuration, the rank, the default type."""
    groups, default = ("_TP", "_DP", "_PCP"), torch.get_default_dtype()
    before = {group: getattr(parallel_state, group) for group in groups}
    config = VllmConfig()
    config.parallel_config.enable_expert_parallel = expert_parallel
    object.__setattr__(config, "model_config", SimpleNamespace(dtype=dtype, enforce_eager=True))
    for group in groups:
        here = (ranks, rank) if group == "_TP" else (1, 0)
        setattr(parallel_state, group, SimpleNamespace(world_size=here[0], rank_in_group=here[1]))
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config):
            yield config
    finally:
        for group, found in before.items():
            setattr(parallel_state, group, found)
        torch.set_default_dtype(default)


def merged(config: Any, sizes: list[int], k: int, prefix: str, bias: bool = False) -> Any:
    """A layer of several columns-parallel parts, such as gate and up."""
    return linear.MergedColumnParallelLinear(k, sizes, bias=bias, quant_config=config, prefix=prefix)


def load(layer: nn.Module, tensors: Mapping[str, Tensor], shard: str | int | None = None) -> None:
    """Load tensors by the engine's own weight loaders, as a model's ``load_weights`` does."""
    parameters = dict(layer.named_parameters())
    for name, tensor in tensors.items():
        parameter = parameters[name]
        arguments = () if shard is None else (shard,)
        parameter.weight_loader(parameter, tensor, *arguments)


def top_k_of_softmax(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> Any:
    """A router's choice; the engine's own is a kernel for GPUs."""
    weights, ids = gating_output.float().softmax(-1).topk(topk)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.int()


def experts(config: Any, count: int, top_k: int, hidden: int, intermediate: int, **options: Any) -> MoERunner:
    """A layer of experts, whose outputs ranks do not add up."""
    usual = {"custom_routing_function": top_k_of_softmax, "reduce_results": False, "prefix": EXPERTS}
    return FusedMoE(
        num_experts=count,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=intermediate,
        quant_config=config,
        **(usual | options),
    )


def run_experts(layer: MoERunner, config: VllmConfig, x: Tensor, logits: Tensor) -> Tensor:
    """A call as the engine makes it, with the configuration that the layer was made with."""
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=len(x)):
        result: Tensor = layer(x.clone(), logits)
    return result


def settle(layer: Any) -> None:
    """After loading, as the engine's model loader does."""
    layer.quant_method.process_weights_after_loading(layer)
