"""vLLM's lists of linear kernels, in which it looks for a layer's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.model_executor.kernels import linear as engine
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
