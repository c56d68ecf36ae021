"""C++ sources include only from their own layer and lower ones, and operations do not include each other."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
pytestmark = pytest.mark.skipif(not SOURCES.is_dir(), reason="not inside a checkout")

LAYERS = ("core", "epilogue", "problems", "cpu", "kernels", "dispatch", "api")
"""Folders of src; each may include those before it. The bindings include public headers and core."""
SHARED = {
    "dispatch/scaled_mm": "dispatch/groupwise_mm",  # scales per row are a case of the group-wise kernel
}
"""Dispatch of an operation that runs on another operation's kernels."""
ARCHITECTURES = ("generic", "sm75", "sm80", "sm90", "sm100")


def includes() -> dict[str, list[str]]:
    """The headers of src that each file includes, as paths relative to src."""
    found = {}
    for file in SOURCES.rglob("*"):
        if file.suffix in (".h", ".cuh", ".cpp", ".cu", ".in") and file.name != "CMakeLists.txt":
            names = re.findall(r'^#include "([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE)
            found[str(file.relative_to(SOURCES))] = [name for name in names if (SOURCES / name).is_file()]
    return found


INCLUDES = includes()


def pairs(depth: int) -> set[tuple[str, str]]:
    """Folders, down to `depth`, that include each other, with files in subfolders counted for the folder."""
    found = set()
    for file, names in INCLUDES.items():
        for name in names:
            one, other = ("/".join(path.split("/")[:-1][:depth]) for path in (file, name))
            if one != other:
                found.add((one, other))
    return found


def test_layers_include_only_lower_ones() -> None:
    allowed = {(upper, lower) for i, upper in enumerate(LAYERS) for lower in LAYERS[:i]} | {("bindings", "core")}
    found = pairs(1)
    assert ("api", "dispatch") in found and ("dispatch", "kernels") in found
    assert found - allowed == set()


def test_operations_do_not_include_each_other() -> None:
    """Each has a folder in dispatch."""
    found = {(one, other) for one, other in pairs(2) if min(one.count("/"), other.count("/")) == 1}
    between = {(one, other) for one, other in found if one.startswith("dispatch/") and other.startswith("dispatch/")}
    assert between == set(SHARED.items())


def test_an_operation_includes_its_own_dispatch() -> None:
    """src/api has a file for each operation."""
    batches = {("scaled_bmm", "scaled_mm")}  # a batch of that operation's products, by the same kernels
    found = set()
    for file, names in INCLUDES.items():
        operation = re.fullmatch(r"api/(?:\w+/)?(\w+)\.cpp", file)
        if operation:
            folders = [re.match(r"dispatch/(\w+)/", name) for name in names]
            found |= {(operation[1], folder[1]) for folder in folders if folder}
    assert ("scaled_mm", "scaled_mm") in found
    assert {(one, other) for one, other in found if one != other} == batches


def test_architectures_do_not_include_each_other() -> None:
    """Kernels share code in kernels/common, and folders of one operation."""
    folders = {f"kernels/{name}" for name in ARCHITECTURES}
    found = pairs(2)
    assert [pair for pair in found if folders >= set(pair)] == []
    assert [pair for pair in found if pair[0] == "kernels/common" and pair[1].startswith("kernels/")] == []


def test_no_circles_between_headers() -> None:
    """graphlib raises CycleError, which shows the circle."""
    assert list(TopologicalSorter(INCLUDES).static_order())
