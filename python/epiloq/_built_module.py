"""Whether the built module is the one that this Python code was written for."""

from __future__ import annotations

import hashlib
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_FOLDER = Path(__file__).parent
_REMEDY = "reinstall epiloq, with `pip install .` in a checkout, or the wheel with `--force-reinstall`"


def load() -> None:
    """Import `epiloq._core`, or raise ImportError where it is missing, does not load or belongs to other Python code.

    CMake compiles a digest of `_core.pyi` into the module: another version or another set of functions or arguments
    gives another digest. The module itself checks libepiloq.
    """
    if find_spec("epiloq._core") is None:
        others = ", ".join(sorted(path.name for path in _FOLDER.glob("_core.*.so"))) or "no built module"
        # A free-threaded CPython, whose modules have names of their own, has a "t" here.
        version = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}"
        raise ImportError(f"epiloq: {_FOLDER} holds {others}, nothing for {version}: {_REMEDY}", name="epiloq._core")
    try:
        core = import_module("epiloq._core")
    except ImportError as error:
        raise ImportError(
            f"epiloq: the built module does not load ({error}): {_REMEDY}", name="epiloq._core", path=error.path
        ) from None
    expected = interface_hash()
    found = core.interface_hash() if hasattr(core, "interface_hash") else "none"
    if expected is not None and found != expected:
        raise ImportError(
            f"epiloq: {core.__file__} (version {core.__version__}, interface {found[:12]}) was built for other Python "
            f"files than those in {_FOLDER} (interface {expected[:12]}): {_REMEDY}",
            name="epiloq._core",
            path=core.__file__,
        )


def interface_hash() -> str | None:
    """SHA-256 of the stub next to this file as hexadecimal digits; None where a packager left the stub out."""
    try:
        return hashlib.sha256((_FOLDER / "_core.pyi").read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
