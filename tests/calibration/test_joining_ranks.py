"""How ranks notice that another has gone, and which device each has."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from epiloq.heartbeat import Heartbeat
from epiloq.quantize.calibration.joining import device_of, fingerprint, joined

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


class Ended:
    """What a heartbeat says when it ends a rank."""

    def __init__(self) -> None:
        self.reason, self.there = "", threading.Event()

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.there.set()


def test_a_silent_rank_is_noticed() -> None:
    store, ended = dist.HashStore(), Ended()
    store.set("rank/1", "alive 5")
    start = time.monotonic()
    heart = Heartbeat(store, 0, 2, ended, patience=0.4, interval=0.05)
    assert ended.there.wait(60)
    assert "rank 1 has died or hangs" in ended.reason and time.monotonic() - start >= 0.4
    assert heart.reason(0) == ended.reason


def test_ranks_that_live_or_have_finished_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each rank's signs of life advance: what a busy machine delays takes no time."""
    store, ended, said = dist.HashStore(), Ended(), [0, 0, 0]

    def say(self: Heartbeat, what: str) -> None:
        store.set(f"rank/{self.rank}", what)
        said[self.rank] += 1

    monkeypatch.setattr(Heartbeat, "_say", say)
    clock = SimpleNamespace(monotonic=lambda: 0.05 * min(said[:2]), sleep=time.sleep)
    monkeypatch.setattr("epiloq.heartbeat.time", clock)
    hearts = [Heartbeat(store, rank, 3, ended, patience=0.6, interval=0.005) for rank in range(3)]
    hearts[2].close()
    until = time.monotonic() + 60
    while clock.monotonic() < 3 and time.monotonic() < until and not ended.there.is_set():
        time.sleep(0.005)
    assert clock.monotonic() >= 3 and not ended.there.is_set()
    for heart in hearts:
        heart.close()


def test_failure_of_a_rank_is_reported() -> None:
    store, ended = dist.HashStore(), Ended()
    hearts = [Heartbeat(store, rank, 2, ended, interval=0.05) for rank in range(2)]
    hearts[1].close("disk full")
    assert hearts[0].reason(60) == "rank 1 failed: disk full"
    assert ended.there.wait(60) and ended.reason == "rank 1 failed: disk full"


def test_a_rank_that_ends_by_itself_is_not_ended() -> None:
    """An error that all ranks raise at once is displayed by the main thread."""
    store, ended = dist.HashStore(), Ended()
    hearts = [Heartbeat(store, rank, 2, ended, interval=0.05) for rank in range(2)]
    for heart in hearts:
        heart.close("the same error")
    time.sleep(0.3)
    assert not ended.there.is_set()


def test_a_process_without_a_launcher_is_alone() -> None:
    with joined("cpu", Ended(), {}) as ranks:
        assert (ranks.rank, ranks.world) == (0, 1)


@pytest.mark.parametrize(
    ("wish", "gpus", "environment", "expected"),
    [
        ("cpu", 4, {"LOCAL_RANK": "3"}, "cpu"),
        ("auto", 0, {"LOCAL_RANK": "1"}, "cpu"),
        ("auto", 4, {}, "cuda:0"),
        ("auto", 4, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "cuda:3"),
        ("cuda", 2, {"LOCAL_RANK": "1", "RANK": "5", "LOCAL_WORLD_SIZE": "2"}, "cuda:1"),
        ("cuda:1", 2, {}, "cuda:1"),
        ("cuda", 2, {"LOCAL_RANK": "2"}, "number 2 is not among the 2"),
        ("cuda:7", 2, {}, "number 7 is not among the 2"),
        ("cuda:0", 2, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "without a number"),
        ("cuda", 0, {}, "expected auto, cpu, or cuda"),
        ("cuda:x", 2, {}, "expected auto, cpu, or cuda"),
        ("cpu:1", 2, {}, "expected auto, cpu, or cuda"),
        ("mps", 2, {}, "expected auto, cpu, or cuda"),
    ],
)
def test_the_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, wish: str, gpus: int, environment: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if expected.startswith(("cpu", "cuda:")):
        assert device_of(wish, environment) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            device_of(wish, environment)


def test_other_files_have_another_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * (3 << 12))
    before = fingerprint(tmp_path, ["weights"])
    assert fingerprint(tmp_path, ["weights"]) == before
    for position in (5, file.stat().st_size - 5):
        changed = bytearray(file.read_bytes())
        changed[position] ^= 1
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        (other / "weights").write_bytes(changed)
        assert fingerprint(other, ["weights"]) != before
