"""Which layers vLLM gives to epiloq's kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
from vllm import envs
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.config.utils import hash_factors
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

import epiloq.integrations.vllm as integration
from epiloq.integrations.vllm import kernels, mixed_precision
from epiloq.integrations.vllm.mixed_precision import EpiloqMixedPrecisionLinearKernel
from vllm_kernel_lists import LISTS, only_epiloq

pytestmark = pytest.mark.usefixtures(only_epiloq.__name__)


def mixed(**changed: Any) -> MPLinearLayerConfig:
    usual = {
        "full_weight_shape": (256, 192),
        "partition_weight_shape": (256, 192),
        "weight_type": scalar_types.uint4b8,
        "act_type": torch.bfloat16,
        "group_size": 128,
        "zero_points": False,
        "has_g_idx": False,
    }
    return MPLinearLayerConfig(**(usual | changed))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"weight_type": scalar_types.uint3b4}, "expects weights of one of"),
        ({"act_type": torch.float8_e4m3fn}, "expects 16-bit activations, got torch.float8_e4m3fn"),
        ({"out_type": torch.float32}, "expects an output in the activations' torch.bfloat16, got torch.float32"),
        ({"group_size": 96}, "expects whole groups of 96"),
        ({"zero_points": True}, "expects zero points with uint4b8 never"),
        ({"partition_weight_shape": (128, 192), "has_g_idx": True}, "expects no activation order"),
        ({"partition_weight_shape": (252, 192), "group_size": -1}, "multiples of 8, got 192 x 252"),
    ],
)
def test_unsupported_layers_are_left_to_the_engine(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match="Failed to find a kernel") as error:
        choose_mp_linear_kernel(mixed(**changed))
    assert reason in str(error.value)


@pytest.mark.parametrize(("size", "taken"), [(32, True), (256, True), (384, False), (768, True), (-1, True)])
def test_groups_that_no_kernel_reads_are_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, size: int, taken: bool
) -> None:
    monkeypatch.setattr(mixed_precision, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    shape = (768, 192)
    layer = mixed(full_weight_shape=shape, partition_weight_shape=shape, group_size=size)
    found, reason = EpiloqMixedPrecisionLinearKernel.can_implement(layer)
    assert found is taken and (taken or "128 times a power of two or whole rows, got 384" in str(reason))


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_mp_linear_kernel(mixed()) is EpiloqMixedPrecisionLinearKernel
    monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", "int8,w8a16")
    assert choose_mp_linear_kernel(mixed(weight_type=scalar_types.uint8b128)) is EpiloqMixedPrecisionLinearKernel
    assert kernels.EpiloqInt8LinearKernel.is_supported()[0] and not kernels.EpiloqFp8LinearKernel.is_supported()[0]
    with pytest.raises(ValueError, match="EPILOQ_ENGINE_LAYERS leaves out w4a16"):
        choose_mp_linear_kernel(mixed())
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "EpiloqMixedPrecisionLinearKernel")
    with pytest.raises(ValueError, match="disabled by environment variable"):
        choose_mp_linear_kernel(mixed(weight_type=scalar_types.uint8b128))


def test_fp8_layers_of_compiled_models_stay_on_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, ours in ((CompilationMode.NONE, True), (CompilationMode.VLLM_COMPILE, False)):
        with vllm_on_cpu.engine():
            get_current_vllm_config().compilation_config.mode = mode
            found, reason = kernels.EpiloqFp8LinearKernel.is_supported()
            assert found is ours and (ours or "EPILOQ_ENGINE_LAYERS=fp8 selects epiloq's" in str(reason))
            assert kernels.EpiloqInt8LinearKernel.is_supported()[0]
            assert kernels.EpiloqFp8BlockLinearKernel.is_supported()[0]
            monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", "fp8")
            assert kernels.EpiloqFp8LinearKernel.is_supported()[0]
            monkeypatch.delenv("EPILOQ_ENGINE_LAYERS")


def test_graphs_compiled_with_other_kernels_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's cache of compiled graphs is keyed by these factors; it has no other way to know of the kernels."""
    keys = []
    for chosen in (None, "none", "int8", "int8,fp8"):
        monkeypatch.delenv("EPILOQ_ENGINE_LAYERS", raising=False)
        if chosen is not None:
            monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", chosen)
        keys.append(hash_factors(envs.compile_factors()))
    monkeypatch.delitem(envs.environment_variables, "EPILOQ_ENGINE_LAYERS")
    keys.append(hash_factors(envs.compile_factors()))
    assert len(set(keys)) == len(keys)


def test_epiloq_is_first_on_gpus_and_last_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    integration.register()
    for by_platform, kernel in LISTS:
        assert by_platform[PlatformEnum.CUDA][0] is kernel and by_platform[PlatformEnum.CUDA].count(kernel) == 1
        assert by_platform[PlatformEnum.CPU][-1] is kernel and by_platform[PlatformEnum.CPU].count(kernel) == 1
