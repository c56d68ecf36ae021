"""Whether epiloq may run a kind of layer on the device that vLLM runs on."""

from __future__ import annotations

from typing import TypeAlias

import vllm.envs as envs
from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.platforms import PlatformEnum, current_platform

from epiloq.integrations.engines.choice import VARIABLE, is_chosen, runs_on

Answer: TypeAlias = tuple[bool, str | None]
"""Whether it is supported, and the reason if not."""

_DEPENDS_ON_BATCH = ("w8a16-fp8",)
"""Kinds without a product that gives a token the same bits in every batch (``epiloq.set_batch_invariant``)."""

_FASTER_COMPILED = ("fp8",)
"""Kinds that are faster on vLLM's kernels where it compiles models: inductor makes one kernel of the quantiser and the
norm before it. Llama-3-8B on an H200: 1.02 to 1.06 times as fast; without compilation epiloq's are, by 1.03 to 1.05."""


_SLOWER_IF_FEW, _FEW = ("w4a16-experts", "w8a16-experts", "nvfp4-experts"), 16
"""Kinds that vLLM runs by default in layers of fewer experts than so many. With Mixtral's 8 on an H200 one token took
1.1 to 1.3 times as long as with Marlin, 16 tokens and more 0.42 to 0.88 times; 128 experts were faster for all."""


def supported(kind: str, capability: int | None = None, experts: int | None = None) -> Answer:
    """Whether epiloq may run a kind of layer here, of so many experts on all ranks; `capability` is the device's unless
    given."""
    if envs.VLLM_BATCH_INVARIANT and kind in _DEPENDS_ON_BATCH:
        return False, f"the sums of epiloq's {kind} depend on the number of tokens"
    if kind in _SLOWER_IF_FEW and experts is not None and experts < _FEW and not is_chosen():
        return False, f"vLLM's own {kind} are faster for one token of few experts; {VARIABLE}={kind} selects epiloq's"
    if kind in _FASTER_COMPILED and not is_chosen() and _compiles():
        return False, f"vLLM's own {kind} kernels are faster in compiled models; {VARIABLE}={kind} selects epiloq's"
    if current_platform.is_cuda():
        return runs_on(kind, capability_here() if capability is None else capability)
    if current_platform._enum not in (PlatformEnum.CPU, PlatformEnum.UNSPECIFIED):
        return False, "epiloq runs on CUDA devices and CPUs"
    return runs_on(kind, None)


def capability_here() -> int | None:
    """The CUDA device's compute capability, 90 for 9.0; None for a CPU."""
    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return None if found is None else found.to_int()


def _compiles() -> bool:
    """Whether vLLM compiles the model whose layers are being made, as it does by default on GPUs."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.compilation_config.mode == CompilationMode.VLLM_COMPILE
