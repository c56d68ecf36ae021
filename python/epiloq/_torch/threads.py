"""torch's threads for the C++ side: a second pool in the process would compete for cores."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from epiloq import _core


def threads_for(x: Tensor) -> int:
    """Number of threads that the C++ side may use for a product of `x` on the CPU."""
    return 1 if x.is_cuda else torch.get_num_threads()


forked = False  # in a child, until its first operation


def _in_child() -> None:
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def use_own_threads() -> None:
    """Keep torch to one thread in a forked child, which has a copy of the parent's pool but none of its threads.

    torch would wait for those forever. Done once, by the first operation of a child; a number set afterwards stays.
    """
    global forked
    if forked:
        forked = False
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)


def share_threads() -> None:
    """Pass the OpenMP runtime that torch is linked to to the C++ side; without one, it uses one thread."""
    try:
        # By its soname, as it is loaded already; its dependencies are searched for the symbol.
        parallel = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_LAZY | os.RTLD_NOLOAD).GOMP_parallel
    except (OSError, AttributeError):
        return
    address = ctypes.cast(parallel, ctypes.c_void_p).value
    assert address is not None
    _core.use_openmp(address)
