"""The tool that shows that a rename changed no code sees what changed, and not what only moved."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

same_code = pytest.importorskip("same_code", reason="the repository's tools are not here")

SOURCE = """
#include "sizes.h"
namespace lib {
namespace {
int doubled(int value) { return twice(value); }
}  // namespace
int total(int a, int b) { return doubled(a) + b; }
}  // namespace lib
"""
HEADER = (
    "#pragma once\nnamespace lib {\ntemplate <class T = int>\nT twice(T x) { return x + x; }\nstruct Unused {};\n}\n"
)


def build(folder: Path, files: dict[str, str]) -> same_code.Build:
    """A checkout and its configured build, without CMake."""
    (folder / "build").mkdir(parents=True)
    (folder / "build" / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={folder}\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    sources = [folder / name for name in files if name.endswith(".cpp")]
    entries = [f'{{"file": "{path}", "command": "g++ -std=c++20 -c {path} -o x.o"}}' for path in sources]
    (folder / "build" / "compile_commands.json").write_text(f"[{', '.join(entries)}]")
    return same_code.Build(folder / "build")


def test_moved_code_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = build(tmp_path / "before", {"a.cpp": SOURCE, "sizes.h": HEADER})
    merged = HEADER.replace("#pragma once", "// Moved.") + SOURCE.replace('#include "sizes.h"', "")
    after = build(tmp_path / "after", {"b.cpp": merged})
    assert same_code.compare_sources(before, after) == 0
    assert "4 declarations in both, 0 only before, 0 only after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"),
    [("x + x", "x + x + 1"), ("return doubled(a) + b", "return b + doubled(a)"), ("struct Unused {};", "")],
)
def test_a_changed_token_is_found(tmp_path: Path, old: str, new: str) -> None:
    before = build(tmp_path / "before", {"a.cpp": SOURCE, "sizes.h": HEADER})
    changed = {"a.cpp": SOURCE.replace(old, new), "sizes.h": HEADER.replace(old, new)}
    assert same_code.compare_sources(before, build(tmp_path / "after", changed)) > 0


def test_renamed_identifiers(tmp_path: Path) -> None:
    renamed = {"a.cpp": SOURCE.replace("doubled", "scaled"), "sizes.h": HEADER}
    table = tmp_path / "renames.txt"
    table.write_text("doubled scaled a.cpp  # only there\ntwice thrice other.h\n")
    before = build(tmp_path / "before", {"a.cpp": SOURCE, "sizes.h": HEADER})
    assert same_code.compare_sources(before, build(tmp_path / "after", renamed)) > 0
    before.renames = same_code.read_renames(table)
    before.__dict__.pop("_by_name")
    assert same_code.compare_sources(before, build(tmp_path / "again", renamed)) == 0


def test_each_architecture_is_preprocessed() -> None:
    line = "nvcc -O3 -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a -c a.cu -o a.o"
    command = shlex.split(line)
    commands = [" ".join(each) for each in same_code.preprocessor_commands(command)]
    assert ["compute_80,code=compute_80" in each for each in commands] == [True, False]
    assert all(each.startswith("nvcc -O3") and "-c a.cu" not in each and each.endswith("-E") for each in commands)
