"""Processes of a gloo group on a CPU, forked from the test, which run a function to its end."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import epiloq.integrations.transformers as integration
from epiloq._torch import threads

SECONDS = 180
"""In which every rank ends after one has died."""


class Ranks:
    """Processes of a group that run a function to its end: their exit codes, and what each raised."""

    def __init__(self, where: Path, world: int, run: Callable[[int], None], stopped: tuple[int, ...] = ()) -> None:
        """Run it. Ranks that are `stopped` end when the others have ended."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        context = multiprocessing.get_context("fork")
        self.output = [where / f"output-{rank}" for rank in range(world)]
        ranks = [
            context.Process(target=self._rank, args=(rank, world, port, self.output[rank], run))
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

    @staticmethod
    def _rank(rank: int, world: int, port: str, text: Path, run: Callable[[int], None]) -> None:
        threads.forked = False  # or its first operation brings a forked process back to one thread
        torch.set_num_threads(1)
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
        try:
            dist.init_process_group("gloo", init_method="env://")
            integration.register()
            run(rank)
        except BaseException as error:
            text.write_text(f"{type(error).__name__}: {error}")
            os._exit(3)
        os._exit(0)

    def message(self, rank: int) -> str:
        return self.output[rank].read_text() if self.output[rank].exists() else ""
