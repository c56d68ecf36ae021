"""Digest of all sources of the kernels. A record of a GPU run is valid for the digest that it contains."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("CMakeLists.txt", "cmake", "include", "src", "third_party")


def files(root: Path = ROOT) -> list[Path]:
    """Return the sources, ordered by path."""
    found = [path for place in PLACES for path in (root / place, *(root / place).rglob("*")) if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def digest(root: Path = ROOT) -> str:
    """SHA-256 of the paths and contents of the sources, in hexadecimal."""
    total = hashlib.sha256()
    for path in files(root):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


if __name__ == "__main__":
    print(digest())
