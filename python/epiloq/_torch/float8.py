"""Which devices have FP8 x FP8 products."""

from __future__ import annotations

from functools import lru_cache

import torch

from epiloq import _core

# What epiloq.config may force, and the builds that hold such products, by the device's compute capability.
_ARCHS = ("auto", "sm89", "sm90")


@lru_cache
def _builds(device: torch.device) -> bool:
    capability, built = torch.cuda.get_device_capability(device), _core.built_archs()
    return ("sm89" in built and capability >= (8, 9)) or ("sm90" in built and capability == (9, 0))


def multiplies_float8(device: torch.device) -> bool:
    """Whether FP8 activations can be multiplied there: on a CPU, and on CUDA from compute capability 8.9 on."""
    return device.type != "cuda" or (_core.forced_arch() in _ARCHS and _builds(device))


# As torch.compiler.assume_constant_result marks it: a graph is for one kind of device.
multiplies_float8._dynamo_marked_constant = True  # type: ignore[attr-defined]
