"""Ranks that watch each other, by gloo on a CPU: one that is stopped ends the others, one that is slow does not."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from epiloq.heartbeat import GRACE
from epiloq.nn import Int8Linear
from epiloq.parallel import RowwiseParallel, watch_ranks
from gloo_ranks import SECONDS, Ranks

PATIENCE = 3.0
pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)


def _layer() -> nn.Module:
    layer: nn.Module = parallelize_module(
        Int8Linear.from_linear(nn.Linear(64, 8)), init_device_mesh("cpu", (2,)), RowwiseParallel()
    )
    return layer


def watched(between: Callable[[int], None]) -> Callable[[int], None]:
    """What a rank runs: two products that are summed over ranks, and something between them."""

    def run(rank: int) -> None:
        layer, x = _layer(), torch.randn(3, 32)
        with watch_ranks(PATIENCE):
            layer(x)
            between(rank)
            layer(x)

    return run


def _stop(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def _fail(rank: int) -> None:
    if rank == 1:
        raise OSError("no text")


def _compute(rank: int) -> None:
    until = time.monotonic() + 2 * PATIENCE
    while rank == 1 and time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)


def test_a_stopped_rank_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One that neither ends nor answers: the others wait for it in C++, within their group's half hour."""
    ranks = Ranks(tmp_path, 2, watched(_stop), stopped=(1,))
    assert ranks.codes == [1, -signal.SIGKILL] and ranks.seconds < SECONDS
    text = capfd.readouterr().err
    assert re.search(r"^epiloq\.parallel: rank 1 has died or hangs: nothing was heard of it for \d+ s$", text, re.M)


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(tmp_path, 2, watched(_fail))
    assert ranks.codes[1] == 3 and ranks.message(1) == "OSError: no text" and ranks.seconds < SECONDS
    # It is told by the watching thread, or in the exchange, if gloo notices first that the rank has gone.
    told = "epiloq.parallel: rank 1 failed: no text" in capfd.readouterr().err
    assert told if ranks.codes[0] == 1 else ranks.message(0).startswith("ConnectionError: epiloq.parallel: ")


def test_a_slow_rank_and_one_that_leaves_are_left_alone(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        watched(_compute)(rank)
        if rank == 0:
            with watch_ranks(PATIENCE):  # The other is not there any more, and was not missed before.
                time.sleep(0.2)

    Ranks(tmp_path, 2, run).check()


@pytest.mark.slow
def test_ranks_that_were_all_stopped_go_on(tmp_path: Path) -> None:
    """As by the pause of a container: the time does not count as silence."""

    def stop(rank: int) -> None:
        (tmp_path / f"pid-{rank}").write_text(str(os.getpid()))
        while not (tmp_path / "resumed").exists():
            time.sleep(0.05)
        time.sleep(PATIENCE + GRACE)

    if (driver := os.fork()) == 0:
        pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
        while not all(pid.exists() and pid.read_text() for pid in pids):
            time.sleep(0.05)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(int(pid.read_text()), number)
            time.sleep(2 * PATIENCE if number == signal.SIGSTOP else 0)
        (tmp_path / "resumed").touch()
        os._exit(0)
    ranks = Ranks(tmp_path, 2, watched(stop))
    os.waitpid(driver, 0)
    ranks.check()


def test_invalid_watch_ranks_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a process group, found none"), watch_ranks():
        pass

    def run(rank: int) -> None:
        with pytest.raises(ValueError, match=r"patience: expected seconds above 0, got 0"), watch_ranks(0):
            pass

    Ranks(tmp_path, 1, run).check()


def _one_is_smaller(rank: int) -> None:
    numbers = torch.tensor([rank, 7])
    dist.all_reduce(numbers)
    assert numbers.tolist() == [1, 14 + rank]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_rank_fails_in_the_test_that_started_it(tmp_path: Path, start_method: Any) -> None:
    ranks = Ranks(tmp_path, 2, _one_is_smaller, start_method=start_method)
    assert ranks.codes == [0, 3]
    with pytest.raises(AssertionError, match=r"^rank 1 ended with 3\nTraceback [^$]*, in _one_is_smaller\n"):
        ranks.check()
