"""Ranks that end when another of them hangs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from epiloq.heartbeat import PATIENCE, Heartbeat

_NAME = "epiloq.parallel"
_FAILED = 1


@contextmanager
def watch_ranks(patience: float = PATIENCE) -> Iterator[None]:
    """Watch the other ranks inside this context, and end this process when one of them hangs, has died or failed.

    Exchanges wait for a rank that is stopped or unreachable until the timeout of the process group, which is two
    hours if transformers creates it. Here a thread sends heartbeats through the group's store, and adds nothing to
    the exchanges. A rank that computes for a long time is not considered dead; nor is one whose main thread is in a
    deadlock, which only the group's timeout ends.

    All ranks must enter it, after ``init_process_group`` or a model's ``from_pretrained``. A rank that leaves it is no
    longer watched; if it leaves by an exception, the other ranks print the reason to stderr and exit with status 1.

    Args:
        patience: seconds without a sign of life after which a rank counts as dead. Time in which this process itself
            was stopped does not count.

    Raises:
        ValueError: without a process group, or with a patience that is not above 0.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{_NAME}: watch_ranks: expected a process group, found none: enter it after the model is open"
        )
    if not patience > 0:
        raise ValueError(f"{_NAME}: watch_ranks: patience: expected seconds above 0, got {patience}")
    # The thread uses a separate connection, because a thread that waits in a store blocks others.
    default: Any = dist.distributed_c10d._get_default_store()
    store = dist.distributed_c10d.PrefixStore("epiloq/watch", default.clone())
    interval = min(1.0, patience / 5)
    with Heartbeat(store, dist.get_rank(), dist.get_world_size(), _end, patience=patience, interval=interval):
        yield


def _end(reason: str) -> None:
    """End the process from the watching thread: the main one may wait for a rank that will not answer."""
    print(f"{_NAME}: {reason}", file=sys.stderr, flush=True)
    os._exit(_FAILED)
