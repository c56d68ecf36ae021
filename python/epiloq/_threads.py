"""torch's threads, lent to the C++ side: a second pool in the process would take cores from the first."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from epiloq import _core


def threads_for(x: Tensor) -> int:
    """How many the C++ side may use for a product of `x`, on the CPU."""
    return 1 if x.is_cuda else torch.get_num_threads()


def lend_threads() -> None:
    """Give the C++ side the OpenMP runtime that torch is linked to; where there is none, it works on one thread."""
    try:
        # By its soname, as it is loaded already; its dependencies are searched for the symbol.
        parallel = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_LAZY | os.RTLD_NOLOAD).GOMP_parallel
    except (OSError, AttributeError):
        return
    address = ctypes.cast(parallel, ctypes.c_void_p).value
    assert address is not None
    _core.use_openmp(address)
