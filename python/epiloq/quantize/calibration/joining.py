"""Rendezvous of the processes started by a launcher such as ``torchrun``, and the device of each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from epiloq.heartbeat import PATIENCE, Heartbeat
from epiloq.quantize.calibration.ranks import Group, Ranks

MEETING = timedelta(minutes=5)
"""Longest time that ranks wait for each other to start."""
_FOREVER = timedelta(days=30)
_READABLE = frozenset({"device", "instruction sets", "threads", "torch", "epiloq"})
"""Facts whose values are shown in messages."""
_ENDS = 1 << 20
"""Bytes at the beginning and end of a file that identify it."""


def device_of(device: str, environment: Mapping[str, str] = os.environ) -> str:
    """The device of this rank: "auto" is a GPU if there is one, "cuda" the GPU with the rank's number on its host.

    Raises ValueError for a GPU that does not exist, or for a numbered GPU with several ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, index = device.partition(":")
    if kind == "auto" and not index:
        kind = "cuda" if gpus else "cpu"
    if kind == "cpu" and not index:
        return kind
    if kind != "cuda" or not gpus or (index and not index.isdecimal()):
        raise ValueError(f"expected auto, cpu, or cuda where torch sees a GPU, got {device!r}")
    local = int(environment.get("LOCAL_RANK", 0))
    if index and int(environment.get("LOCAL_WORLD_SIZE", 1)) > 1:
        raise ValueError(f"expected cuda without a number, as each of several ranks has its own, got {device!r}")
    number = int(index) if index else local
    if number >= gpus:
        raise ValueError(f"expected a GPU for each rank, but number {number} is not among the {gpus} that torch sees")
    return f"cuda:{number}"


@contextmanager
def joined(
    device: str,
    end: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
    patience: float = PATIENCE,
) -> Iterator[Ranks]:
    """Join the processes that a launcher started together; yields this process's `Ranks`.

    If a rank dies or leaves this context by an exception, the others get ConnectionError in their next exchange, or
    ``end(reason)`` is called in another thread and should end the process. Ranks that finish may leave early.

    Args:
        device: this rank's device, from `device_of`.
        environment: environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the process.
        patience: seconds without a heartbeat after which a rank counts as dead.
    """
    if int(environment.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    if not dist.is_available():
        raise ValueError("several ranks (WORLD_SIZE): expected a torch with torch.distributed")
    from torch.distributed.rendezvous import rendezvous

    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    store, rank, world = next(rendezvous("env://", timeout=MEETING))
    try:
        with Heartbeat(store.clone(), rank, world, end, patience=patience, terminated=True) as heart:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=_FOREVER
            )
            yield Group(device, heart.reason)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check_alike(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Raise ValueError on all ranks unless all have the same facts, given by the names to use in the message."""
    everyone = ranks.gather(dict(facts))
    with ranks.together():
        for rank, others in enumerate(everyone):
            first = everyone[0]
            differing = sorted(key for key in first.keys() | others.keys() if first.get(key) != others.get(key))
            if differing:
                named = ", ".join(_contrast(key, others.get(key), first.get(key)) for key in differing)
                raise ValueError(
                    f"rank {rank} and rank 0 have different {named}: expected the same versions, files, options and "
                    "kind of machine on every rank"
                )


def _contrast(key: str, one: Any, other: Any) -> str:
    return f"{key} ({one} and {other})" if key in _READABLE else key


def fingerprint(folder: Path, files: Iterable[str]) -> str:
    """A hash of files' lengths, beginnings and ends; a safetensors file begins with all names and shapes."""
    digest = hashlib.sha256()
    for name in sorted(files):
        size = (folder / name).stat().st_size
        with open(folder / name, "rb") as file:
            digest.update(f"{name} {size}|".encode() + file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()
