"""Demonstration: a real language model, quantised by each scheme and compared with the original."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


class DemoError(RuntimeError):
    """The demonstration cannot continue; the message says what the user can do about it."""


def file_of_package(package: str, ending: str, what: str, install: str) -> Path:
    """Find a file of an installed package through its metadata, without importing it. Raises DemoError if absent."""
    try:
        recorded = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise DemoError(f"{what} are in the package {package}, which is not installed: {install}") from None
    found = [path for path in (Path(str(entry.locate())) for entry in recorded) if path.name.endswith(ending)]
    if not found or not found[0].is_file():
        raise DemoError(f"the installed {package} contains no {ending} file: {install} --force-reinstall")
    return found[0]
