"""Which architectures' kernels a GPU runs."""

from __future__ import annotations

import torch

from epiloq import _core


def runs_kernels_of(device: torch.device, *archs: str) -> bool:
    """Whether a CUDA device runs this build's kernels of one of these architectures, unless others are forced.

    Newer GPUs run older architectures' kernels, but not WGMMA, which only SM90 has.
    """
    forced = _core.forced_arch()
    found = [arch for arch in archs if arch in _core.built_archs() and forced in ("auto", arch)]
    capability = _core.device_properties(device.index or 0)["compute_capability"]
    return any(capability == 90 if arch == "sm90" else capability >= int(arch.removeprefix("sm")) for arch in found)
