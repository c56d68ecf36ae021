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


forked = False  # in a child, until its first operation


def _in_child() -> None:
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def use_own_threads() -> None:
    """Keep torch to one thread in a forked child, which has a copy of the parent's pool but none of its threads.

    torch would wait for those for ever. It is done once, by the first operation of a child: who sets another number
    afterwards knows that there is no pool.
    """
    global forked
    if forked:
        forked = False
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)


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
