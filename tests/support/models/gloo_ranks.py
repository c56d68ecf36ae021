"""Processes of a group, by gloo on a CPU and forked from the test unless told otherwise, which run a function."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from epiloq._torch import threads

_FORK = multiprocessing.get_context("fork")
SECONDS = 180
"""In which every rank ends after one has died."""


@contextmanager
def store_of_ranks() -> Iterator[dict[str, str]]:
    """A store in a process of its own, as launchers have it; yields the environment variables with its address.

    The store itself chooses a free port. A port that is chosen first and opened later, by the first rank, may meanwhile
    be given to another process.
    """
    here, there = _FORK.Pipe()
    process = _FORK.Process(target=_keep_store, args=(here, there))
    process.start()
    there.close()
    try:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(here.recv()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    finally:
        here.close()
        process.kill()
        process.join()


def _keep_store(here: Any, there: Any) -> None:
    here.close()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there.send(store.port)
    try:
        there.recv()  # until the test closes its end
    except EOFError:
        os._exit(0)


class Ranks:
    """Processes of a group that run a function to its end: their exit codes, and what each raised."""

    def __init__(
        self,
        where: Path,
        world: int,
        run: Callable[[int], None],
        stopped: tuple[int, ...] = (),
        backend: str = "gloo",
        start_method: Literal["fork", "spawn"] = "fork",
    ) -> None:
        """Run it. Ranks that are `stopped` end when the others have ended.

        Forked ranks need no imports, and `run` may be any function. Those that use CUDA must be spawned: `run` is then
        pickled.
        """
        context: Any = multiprocessing.get_context(start_method)
        self.output = [where / f"output-{rank}" for rank in range(world)]
        with store_of_ranks() as address:
            ranks = [
                context.Process(target=_rank, args=(rank, world, address, backend, self.output[rank], run))
                for rank in range(world)
            ]
            start = time.monotonic()
            for each in ranks:
                each.start()
            for rank in sorted(range(world), key=lambda rank: rank in stopped):
                ranks[rank].join(timeout=0 if rank in stopped else SECONDS + 60)
                ranks[rank].kill()
            self.seconds = time.monotonic() - start
            for each in ranks:
                each.join()
        self.codes = [each.exitcode for each in ranks]

    def message(self, rank: int) -> str:
        """What a rank raised, in one line; empty if nothing."""
        return self.output[rank].read_text() if self.output[rank].exists() else ""

    def check(self) -> None:
        """Raise AssertionError, with the traceback of each rank that failed, unless all ran to their end."""
        texts = [path.with_suffix(".traceback") for path in self.output]
        found = [
            f"rank {rank} ended with {code}\n{texts[rank].read_text() if texts[rank].exists() else ''}"
            for rank, code in enumerate(self.codes)
            if code
        ]
        assert not found, "\n".join(found)


def _rank(
    rank: int, world: int, address: dict[str, str], backend: str, output: Path, run: Callable[[int], None]
) -> None:
    threads.forked = False  # or its first operation brings a forked process back to one thread
    torch.set_num_threads(1)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in own.items()} | address
    try:
        dist.init_process_group(backend, init_method="env://")
        run(rank)
    except BaseException as error:
        output.with_suffix(".traceback").write_text(traceback.format_exc())
        output.write_text(f"{type(error).__name__}: {error}")
        os._exit(3)
    os._exit(0)
