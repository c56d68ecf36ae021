"""Habits: what runs on a change, the size of folders, and no binding without a caller."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="transformers brings it")

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="not inside a checkout")


def targets() -> dict[str, str]:
    """The recipes of the Makefile by target."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {name: recipe for name, recipe in re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", text, re.MULTILINE)}


def test_continuous_integration_lints_and_runs_every_test() -> None:
    phases = re.findall(r"^phase (.*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert phases[:3] == ["make lint", "make test-all", "make sanitize"]
    assert "-m 'not slow'" in targets()["test"] and "slow" not in targets()["test-all"]


@pytest.mark.parametrize(("count", "kept"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 2]), (391, [0, 390])])
def test_make_test_runs_a_few_cases_of_each_test(count: int, kept: list[int], pytestconfig: pytest.Config) -> None:
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert conftest.few_of(list(range(count))) == kept


def test_hooks_run_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]
    entries = [hook["entry"].split() for hook in hooks[0]["hooks"]]
    lint = targets()["lint"]
    assert [entry for entry in entries if f"$(BIN)/{entry[0]}" not in lint] == []
    assert {entry[0] for entry in entries} == set(re.findall(r"\$\(BIN\)/([\w-]+)", lint))


def test_the_matrix_has_every_python_and_the_oldest_torch() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    promised = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix["python"] == promised
    oldest = re.search(r'"torch>=([\d.]+)"', project)
    here = [row for row in matrix["include"] if row["runner"] in matrix["runner"]]
    elsewhere = [row for row in matrix["include"] if row not in here]
    assert oldest and {row["torch"] for row in here} == {f"torch=={oldest.group(1)}.*"}
    assert {(row["runner"], row["torch"]) for row in elsewhere} == {("ubuntu-24.04-arm", "torch")}


LARGEST = 15
FLAT = "include/epiloq"
"""Public headers: a subfolder would break users' includes (docs/source_tour.md)."""


def test_no_folder_is_large() -> None:
    """The Python package has its own test (test_packages.py)."""
    counts: Counter[str] = Counter()
    for top in ("benchmarks", "cmake", "docs", "examples", "include", "src", "tests", "tools"):
        for path in (ROOT / top).rglob("*"):
            folder = path.parent.relative_to(ROOT)
            if path.is_file() and "__pycache__" not in folder.parts and not path.name.startswith("."):
                counts[str(folder)] += 1
    assert counts["src/api"] > 10
    assert {folder: count for folder, count in counts.items() if count > LARGEST and folder != FLAT} == {}


def test_every_binding_has_a_caller() -> None:
    """Of the package, or of tests and tools for what users do not need."""
    stub = (ROOT / "python" / "epiloq" / "_core.pyi").read_text(encoding="utf-8")
    bindings = set(re.findall(r"^def (\w+)", stub, re.MULTILINE))
    # Names are looked up by the operation's name in some places.
    made = {f"{kind}_{name}" for name in bindings for kind in ("candidates", "explain")}
    called = set(made)
    for top in ("python", "tests", "tools", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            called |= set(re.findall(r"\b(?:_core|core)\.(\w+)", path.read_text(encoding="utf-8")))
    assert len(bindings) > 50 and sorted(bindings - called) == []
