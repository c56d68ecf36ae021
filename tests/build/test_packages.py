"""Folders and modules of the Python package have no import circles, and folders stay small."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import epiloq

ROOT = Path(epiloq.__file__).parent
LARGEST = 15


def loaded(tree: ast.AST) -> Iterator[str]:
    """Modules of epiloq imported when a file is loaded: not in functions, nor for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "epiloq":
            yield from (f"{node.module}.{name.name}" for name in node.names)
        yield from loaded(node)


def test_no_circles_between_folders() -> None:
    """graphlib raises CycleError, which shows the circle."""
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    needs: dict[str, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for name in loaded(ast.parse(path.read_text(encoding="utf-8"))):
                other = name.split(".")[1]
                if other in folders - {folder}:
                    needs[folder].add(other)
    assert needs["quantize"] >= {"formats"}
    assert list(TopologicalSorter(needs).static_order())


def test_formats_never_import_quantize() -> None:
    """Nor inside functions or for type checkers: quantize depends on formats, never the reverse."""
    found = []
    for path in (ROOT / "formats").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            else:
                continue
            found += [(path.name, name) for name in names if f"{name}.".startswith("epiloq.quantize.")]
    assert found == []


def test_no_circles_between_modules() -> None:
    """The same between modules. `_core` is compiled and imports none of them."""
    files = {path: ".".join(("epiloq", *path.relative_to(ROOT).with_suffix("").parts)) for path in ROOT.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for path, name in files.items()}
    needs: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = loaded(ast.parse(path.read_text(encoding="utf-8")))
        found = {name if name in modules else name.rpartition(".")[0] for name in names if name != "epiloq._core"}
        needs[module] = found - {module}
    assert needs["epiloq.quantize.job"] > {"epiloq.quantize.plan"}
    assert list(TopologicalSorter(needs).static_order())


def test_no_folder_is_large() -> None:
    counts = Counter(path.parent for path in ROOT.rglob("*") if path.suffix in (".py", ".pyi", ".html", ".typed"))
    assert {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > LARGEST} == {}
