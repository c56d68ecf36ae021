"""Files that a reader finds whole."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, content: str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part, also of a run that is cut short."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(content, encoding="utf-8")
    aside.replace(path)
