"""Folders of the Python package depend on each other one way, and stay small."""

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
    """Modules of epiloq that are imported when a file is loaded: not in functions, nor for type checkers alone."""
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


def test_no_folder_is_large() -> None:
    counts = Counter(path.parent for path in ROOT.rglob("*") if path.suffix in (".py", ".pyi", ".html", ".typed"))
    assert {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > LARGEST} == {}
