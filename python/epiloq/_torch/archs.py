"""Which architectures' kernels a GPU runs."""

from __future__ import annotations

import torch

from epiloq import _core


def runs_kernels_of(device: torch.device, *archs: str) -> bool:
    """Whether a CUDA device runs this build's kernels of one of these architectures, unless others are forced.

    Newer GPUs run older architectures' kernels, but not WGMMA, which only SM90 has.
    """
    return any(_core.runs_kernels_of(arch, device.index or 0) for arch in archs)
