"""Arguments of a gated activation."""

from __future__ import annotations

import math
from typing import Any

from epiloq._torch.checks import as_number

# No limit is None in operators: exported programs and packages of AOTInductor cannot hold infinities.
GATE = "float alpha=1.0, float? limit=None, float offset=0.0"


def gate_numbers(name: str, alpha: float, limit: float, offset: float) -> tuple[float, float, float]:
    """Convert the numbers of a gate to float. C++ checks their values."""
    if type(alpha) is type(limit) is type(offset) is float:
        return alpha, limit, offset
    return as_number(name, "alpha", alpha), as_number(name, "limit", limit), as_number(name, "offset", offset)


def for_operator(alpha: float, limit: float, *others: Any) -> tuple[Any, ...]:
    """The arguments of an operator from those of a gate and others."""
    return alpha, None if limit == math.inf else limit, *others
