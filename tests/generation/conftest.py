from __future__ import annotations

import pytest


@pytest.fixture(params=[0, 2])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As on a GPU, the host sees the end of a sequence this many steps late."""
    from epiloq.generation import loop

    monkeypatch.setitem(loop.LAG, "cpu", request.param)
    return int(request.param)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of fixed size is made and kept if none was asked for."""
    from epiloq.generation import loop

    monkeypatch.setattr(loop, "STATIC_ON", {"cpu"})
