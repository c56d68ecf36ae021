"""Whether epiloq may run a kind of layer on the device that vLLM runs on."""

from __future__ import annotations

from typing import TypeAlias

import vllm.envs as envs
from vllm.platforms import PlatformEnum, current_platform

from epiloq.integrations.engines.choice import runs_on

Answer: TypeAlias = tuple[bool, str | None]
"""Whether it is supported, and the reason if not."""

_DEPENDS_ON_BATCH = ("w8a16-fp8",)
"""Kinds without a product that gives a token the same bits in every batch (``epiloq.set_batch_invariant``)."""


def supported(kind: str, capability: int | None = None) -> Answer:
    """Whether epiloq may run a kind of layer here; `capability` is the device's unless given."""
    if envs.VLLM_BATCH_INVARIANT and kind in _DEPENDS_ON_BATCH:
        return False, f"the sums of epiloq's {kind} depend on the number of tokens"
    if current_platform.is_cuda():
        if capability is None:
            found = current_platform.get_device_capability()
            capability = None if found is None else found.to_int()
        return runs_on(kind, capability)
    if current_platform._enum not in (PlatformEnum.CPU, PlatformEnum.UNSPECIFIED):
        return False, "epiloq runs on CUDA devices and CPUs"
    return runs_on(kind, None)
