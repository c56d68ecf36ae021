"""The stub of the C++ module is what the tool makes of the module."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("pybind11_stubgen", reason="the stub is made by pybind11-stubgen")
stubs = pytest.importorskip("stubs", reason="the tools are not here")
if not (Path(stubs.sys.executable).with_name("ruff").is_file() or shutil.which("ruff")):
    pytest.skip("the stub is formatted by ruff", allow_module_level=True)


@pytest.mark.skipif(not stubs.STUB.is_file(), reason="not inside a checkout")
def test_the_stub_is_up_to_date() -> None:
    assert stubs.generate() == stubs.STUB.read_text(encoding="utf-8"), "run `make stubs` after `make venv`"
