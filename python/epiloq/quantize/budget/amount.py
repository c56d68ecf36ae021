"""The size budget of ``epiloq quantize``, as given by the user."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)")


@dataclass(frozen=True)
class Budget:
    """What the result may take; exactly one of the first two is given.

    file_bytes
        Bytes of the weight files, all that stays in floating point included.
    bits
        Bits per weight of the quantised layers, scales and zero points included.
    candidates
        Names of the schemes to choose from; see `candidates.grids`.
    """

    file_bytes: int | None = None
    bits: float | None = None
    candidates: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """As text, with the option that sets it."""
        return f"--bits {self.bits:g}" if self.file_bytes is None else f"--bytes {megabytes(self.file_bytes)}"


def parse_bytes(text: str) -> int:
    """A number of bytes, such as 90MB or 1.5GiB. Raises ValueError for other text, or none at all."""
    found = _AMOUNT.fullmatch(text.strip())
    unit = None if found is None else UNITS.get(found.group(2).upper())
    if found is None or unit is None or float(found.group(1)) * unit < 1:
        raise ValueError(
            f"--bytes: expected a number and a unit (B, kB, MB, GB, KiB, MiB, GiB), as in 90MB, got {text!r}"
        )
    return int(float(found.group(1)) * unit)


def megabytes(count: float) -> str:
    """A number of bytes as `parse_bytes` takes it, rounded up, so that the printed number suffices."""
    return f"{-(-count // 10**4) / 100:g}MB"
