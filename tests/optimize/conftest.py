from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a decoder layer was a step."""
    from epiloq.optimize.step import Step

    seen: list[bool] = []
    step = Step.__call__

    def counted(self: Step, x: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        result = step(self, x, arguments)
        seen.append(result is not None)
        return result

    monkeypatch.setattr(Step, "__call__", counted)
    return seen
