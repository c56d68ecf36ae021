"""`import epiloq` refuses a built module, or a library, that belongs to another state of the sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import epiloq
from epiloq import _built_module

CORE = Path(epiloq._core.__file__)
LIBRARY = CORE.parent / "lib" / "libepiloq.so"
PACKAGE = Path(epiloq.__file__).parent
pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="libepiloq.so is not in the package's folder")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package's folder once more: each entry a link, except the stub and both built files."""
    folder = tmp_path / "epiloq"
    (folder / "lib").mkdir(parents=True)
    for path in PACKAGE.iterdir():
        if path.name not in ("lib", "__pycache__", CORE.name, "_core.pyi"):
            (folder / path.name).symlink_to(path)
    for path, copy in ((CORE, CORE.name), (LIBRARY, "lib/libepiloq.so"), (PACKAGE / "_core.pyi", "_core.pyi")):
        (folder / copy).write_bytes(path.read_bytes())
    return folder


def imported(package: Path) -> tuple[int, str]:
    """The exit status of an import, in a Python without torch, and the last line that it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
    environment["PYTHONPATH"] = str(package.parent)
    code = "import epiloq; print(epiloq.__file__)"
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    return run.returncode, (run.stdout + run.stderr).strip().splitlines()[-1]


def refusal(package: Path) -> str:
    status, message = imported(package)
    assert status == 1 and message.startswith("ImportError: epiloq: ") and "reinstall epiloq" in message, message
    return message


def test_matching_module_is_imported(package: Path) -> None:
    assert imported(package) == (0, str(package / "__init__.py"))


def test_a_package_without_stubs_is_imported(package: Path) -> None:
    (package / "_core.pyi").unlink()
    assert imported(package) == (0, str(package / "__init__.py"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def built_archs() -> list[str]: ...", ""),
        ("def use_openmp(parallel: int)", "def use_openmp(parallel: int, threads: int)"),
        ("column_scales: bool = False", "column_scales: bool = True"),
        (f'__version__: str = "{epiloq.__version__}"', '__version__: str = "1900.1"'),
    ],
    ids=["function", "argument", "default", "version"],
)
def test_a_module_of_another_interface_is_refused(package: Path, old: str, new: str) -> None:
    text = (package / "_core.pyi").read_text(encoding="utf-8")
    assert old in text
    (package / "_core.pyi").write_text(text.replace(old, new), encoding="utf-8")
    message = refusal(package)
    assert "was built for other Python files" in message and str(package / CORE.name) in message


def test_a_library_of_other_sources_is_refused(package: Path) -> None:
    """The library's digest of its sources is one that the module holds too; another one is put in its place."""
    library = package / "lib" / "libepiloq.so"
    digest = epiloq._core.source_hash().encode()
    content = library.read_bytes()
    assert len(digest) == 12 and content.count(digest) == 1
    library.write_bytes(content.replace(digest, b"0123456789ab"))
    message = refusal(package)
    assert f"libepiloq.so was built from other sources (0123456789ab) than _core ({digest.decode()})" in message


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_library_that_does_not_load_is_refused(package: Path, content: bytes | None) -> None:
    library = package / "lib" / "libepiloq.so"
    library.unlink()
    if content is not None:
        library.write_bytes(content)
    assert "the built module does not load" in refusal(package) and "libepiloq.so" in refusal(package)


def test_a_module_for_another_python_is_named(package: Path) -> None:
    (package / CORE.name).rename(package / "_core.cpython-33m-x86_64-linux-gnu.so")
    message = refusal(package)
    assert "_core.cpython-33m-x86_64-linux-gnu.so, nothing for cpython" in message


def test_a_module_for_python_with_a_gil_is_named_by_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free-threaded CPython has the same version, but other modules."""
    monkeypatch.setattr(_built_module, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "abiflags", "t")
    with pytest.raises(ImportError, match=rf"nothing for cpython 3\.{sys.version_info.minor}t: reinstall epiloq"):
        _built_module.load()
