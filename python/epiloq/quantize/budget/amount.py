"""The size budget of ``epiloq quantize``, as given by the user."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)")


@dataclass(frozen=True)
class Budget:
    """The size limit of the result; exactly one of `file_bytes` and `bits` is given.

    file_bytes
        Size of the weight files in bytes, including everything that stays in floating point.
    bits
        Bits per weight of the quantised layers, including scales and zero points.
    candidates
        Names of the schemes to choose from; see `candidates.grids`.
    """

    file_bytes: int | None = None
    bits: float | None = None
    candidates: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The command-line option and value that set it, for messages."""
        return f"--bits {self.bits:g}" if self.file_bytes is None else f"--bytes {megabytes(self.file_bytes)}"


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, such as 90MB or 1.5GiB. Raises ValueError for other or empty text."""
    found = _AMOUNT.fullmatch(text.strip())
    unit = None if found is None else UNITS.get(found.group(2).upper())
    if found is None or unit is None or float(found.group(1)) * unit < 1:
        raise ValueError(
            f"--bytes: expected a number and a unit (B, kB, MB, GB, KiB, MiB, GiB), as in 90MB, got {text!r}"
        )
    return int(float(found.group(1)) * unit)


def megabytes(count: float) -> str:
    """Format bytes for `parse_bytes`, rounded up, so that the printed budget suffices; in kB below 0.1 MB."""
    unit, size = ("kB", 10**3) if count < 10**5 else ("MB", 10**6)
    return f"{-(-100 * count // size) / 100:g}{unit}"
