"""vLLM's lists of linear kernels, in which it looks for a layer's, and its choices for experts on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.model_executor.kernels import linear as engine
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.platforms import PlatformEnum

import epiloq.integrations.vllm as integration
from epiloq.integrations.vllm import kernels
from epiloq.integrations.vllm.mixed_precision import EpiloqMixedPrecisionLinearKernel

LISTS = (
    (engine._POSSIBLE_INT8_KERNELS, kernels.EpiloqInt8LinearKernel),
    (engine._POSSIBLE_FP8_KERNELS, kernels.EpiloqFp8LinearKernel),
    (engine._POSSIBLE_FP8_BLOCK_KERNELS, kernels.EpiloqFp8BlockLinearKernel),
    (engine._POSSIBLE_KERNELS, EpiloqMixedPrecisionLinearKernel),
)


@pytest.fixture
def only_epiloq(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU, where epiloq comes last, for every layer."""
    integration.register()
    for by_platform, kernel in LISTS:
        monkeypatch.setitem(by_platform, PlatformEnum.CPU, [kernel])
    yield


def backends_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM chooses on GPUs for experts that it does not run on a CPU: integers and FP4."""
    layers = "vllm.model_executor.layers.quantization"
    compressed = "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
    words = WNA16MoEBackend.MARLIN, MarlinExperts
    for module in ("auto_gptq", "auto_awq", f"{compressed}_wna16_marlin"):
        monkeypatch.setattr(f"{layers}.{module}.select_wna16_moe_backend", lambda *_, **__: words)
    int8, fp4 = (Int8MoeBackend.TRITON, None), (Mxfp4MoeBackend.MARLIN, MarlinExperts)
    nvfp4 = NvFp4MoeBackend.MARLIN, MarlinExperts
    monkeypatch.setattr(f"{layers}.{compressed}_w4a4_nvfp4.select_nvfp4_moe_backend", lambda *_, **__: nvfp4)
    monkeypatch.setattr(f"{layers}.{compressed}_w8a8_int8.select_int8_moe_backend", lambda *_, **__: int8)
    monkeypatch.setattr(f"{layers}.mxfp4.select_mxfp4_moe_backend", lambda *_: fp4)
    for module in ("auto_gptq", "auto_awq"):
        monkeypatch.setattr(f"{layers}.{module}.marlin_make_workspace_new", lambda *_: torch.empty(0))
