"""Lets a rank notice that another has died or failed, even while waiting for it in an exchange."""

from __future__ import annotations

import itertools
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

INTERVAL = 1.0
PATIENCE = 30.0
GRACE = 3.0
"""Seconds between signs of life, of silence after which a rank counts as dead, and in which this one ends by itself."""

_ALIVE, _DONE, _FAILED = "alive", "done", "failed"


class Heartbeat:
    """A thread that gives signs of life and looks for those of the other ranks.

    Args:
        store: a ``torch.distributed.Store`` that nothing else uses, for a thread that waits in one blocks others.
        end: called in the thread with a sentence when this rank cannot go on. It should end the process, for the main
            thread may be waiting for a rank that is not there any more.
        terminated: whether a SIGTERM, by which launchers end the ranks that are left, ends this one too, in that way.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        end: Callable[[str], None],
        *,
        patience: float = PATIENCE,
        interval: float = INTERVAL,
        terminated: bool = False,
    ) -> None:
        self.store, self.rank, self.end = store, rank, end
        self.patience, self.interval = patience, interval
        self.lost: str | None = None
        self._looked = time.monotonic()
        self._heard: dict[int, tuple[str, float]] = {
            other: ("", self._looked) for other in range(world) if other != rank
        }
        self._stopped, self._wake = threading.Event(), socket.socketpair()
        if terminated:
            # The signal's number is written even while the main thread waits in C++, where no handler runs.
            self._wake[1].setblocking(False)
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self, failure: str | None = None) -> None:
        """Tell the others that this rank has done its part or, in a sentence, why it fails."""
        self._stopped.set()
        with suppress(BlockingIOError):
            self._wake[1].send(b"\0")
        self._thread.join(timeout=GRACE)
        with suppress(Exception):  # Without the store, no rank is left to be told.
            self._say(_DONE if failure is None else f"{_FAILED} {failure}")

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(None if error is None else str(error) or type(error).__name__)

    def reason(self, seconds: float = GRACE) -> str:
        """Return why an exchange failed, after waiting up to `seconds` for a message from another rank."""
        until = time.monotonic() + seconds
        while self.lost is None and time.monotonic() < until:
            time.sleep(0.05)
        return self.lost or "the connection to another rank was lost"

    def _say(self, what: str) -> None:
        self.store.set(f"rank/{self.rank}", what)

    def _run(self) -> None:
        for count in itertools.count():
            if self._stopped.is_set():
                return
            try:
                self._say(f"{_ALIVE} {count}")
                lost = self._silent()
            except Exception:
                lost = "the launcher, or the rank that the others met at, has gone"
            if lost is None and self._signalled():
                lost = self._silent() or "another rank has ended"
            if lost is not None and not self._stopped.is_set():
                self.lost = lost
                if not self._stopped.wait(GRACE):
                    self.end(lost)
                return

    def _signalled(self) -> bool:
        """Wait for the next time to look; whether the process was told to end meanwhile."""
        readable, _, _ = select.select([self._wake[0]], [], [], self.interval)
        return bool(readable) and signal.SIGTERM in self._wake[0].recv(64)

    def _silent(self) -> str | None:
        """A sentence about a rank that failed or has not been heard of."""
        now = time.monotonic()
        if now - self._looked > self.patience / 2:
            # This process was suspended, and the others may have been too: their time limits start again now.
            self._heard = {other: (value, now) for other, (value, _) in self._heard.items()}
        self._looked = now
        for other, (before, since) in self._heard.items():
            if not self.store.check([f"rank/{other}"]):
                continue  # Still starting; meeting has a time limit of its own.
            value = self.store.get(f"rank/{other}").decode()
            if value.startswith(_FAILED):
                return f"rank {other} failed: {value.removeprefix(_FAILED).strip()}"
            if value != before or value == _DONE:
                self._heard[other] = value, now
            elif now - since > self.patience:
                return f"rank {other} has died or hangs: nothing was heard of it for {now - since:.0f} s"
        return None
