"""What a device can run."""

from __future__ import annotations

import torch

from epiloq import _core


def multiplies_float8(device: torch.device) -> bool:
    """Whether FP8 activations can be multiplied there: on a CPU, and on CUDA from compute capability 8.9 on."""
    if device.type != "cuda":
        return True
    return _core.multiplies_float8(torch.cuda.current_device() if device.index is None else device.index)


# As torch.compiler.assume_constant_result marks it: a graph is for one kind of device.
multiplies_float8._dynamo_marked_constant = True  # type: ignore[attr-defined]


def runs_kernels_of(device: torch.device, *archs: str) -> bool:
    """Whether a CUDA device runs this build's kernels of one of these architectures, unless others are forced.

    Newer GPUs run older architectures' kernels, but not WGMMA, which only SM90 has.
    """
    return any(_core.runs_kernels_of(arch, device.index or 0) for arch in archs)
