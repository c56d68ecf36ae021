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
from vllm.model_executor.layers import linear

DTYPE = torch.bfloat16


@contextmanager
def engine(rank: int = 0, ranks: int = 1, dtype: torch.dtype = DTYPE) -> Iterator[None]:
    """What layers ask for when they are made: the configuration, the rank, the default type."""
    before, default = parallel_state._TP, torch.get_default_dtype()
    config = VllmConfig()
    object.__setattr__(config, "model_config", SimpleNamespace(dtype=dtype, enforce_eager=True))
    parallel_state._TP = SimpleNamespace(world_size=ranks, rank_in_group=rank)
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config):
            yield
    finally:
        parallel_state._TP = before
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


def settle(layer: Any) -> None:
    """After loading, as the engine's model loader does."""
    layer.quant_method.process_weights_after_loading(layer)
