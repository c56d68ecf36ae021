"""Tells which devices have FP8 x FP8 products."""

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
