"""A child that is forked after torch's pool was used computes, with every operation, rather than wait for the pool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import epiloq
import operation_arguments
from every_operation import OPERATIONS, Operation, named

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
SECONDS = 180  # what takes milliseconds where it does not wait for ever


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pool of torch's that was used, and tensors for which torch uses it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(1000, 1000).exp_()
    # More elements than torch computes on one thread.
    monkeypatch.setattr(operation_arguments, "SIZE", 256)
    yield
    torch.set_num_threads(threads)


def status_of_child(work: Callable[[], Any]) -> int:
    """The exit status of a forked child that does `work`; -SIGKILL where it did not come back."""
    child = os.fork()
    if child == 0:  # nothing of pytest's may run in it
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("operation", [pytest.param(o, id=n) for n, o in zip(named(), OPERATIONS, strict=True)])
def test_operations(operation: Operation, seed: int) -> None:
    arguments = operation.arguments()
    assert status_of_child(lambda: operation.call(**arguments)) == 0


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "int8 of a tensor": (lambda: epiloq.nn.Int8Linear.from_linear(nn.Linear(512, 512)), (512, 512)),
    "4 bits": (lambda: epiloq.nn.WeightOnlyLinear.from_linear(nn.Linear(512, 512)), (512, 512)),
    "int8 convolution": (
        lambda: epiloq.nn.Int8Conv2d.from_conv2d(nn.Conv2d(16, 32, 3), input_scale=0.02, input_zero_point=3),
        (2, 16, 64, 64),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str, seed: int) -> None:
    """Those that were made before the fork, and in the child."""
    make, shape = LAYERS[kind]
    layer, x = make(), torch.randn(shape)
    assert status_of_child(lambda: layer(x)) == 0
    assert status_of_child(lambda: epiloq.quantize_int8(x, granularity="tensor")) == 0
    assert torch.get_num_threads() == 2  # of the parent
