"""Which layers of an engine epiloq takes, without an engine."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from epiloq import _core
from epiloq.integrations.engines.choice import BY_DEFAULT, KERNELS, VARIABLE, chosen_layers, runs_on

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (None, BY_DEFAULT),
        ("all", tuple(KERNELS)),
        ("none", ()),
        ("", ()),
        ("fp8-block-experts,w4a16", ("w4a16", "fp8-block-experts")),
        (" w8a16 ,int8,", ("int8", "w8a16")),
    ],
)
def test_the_variable(monkeypatch: pytest.MonkeyPatch, message: str | None, expected: tuple[str, ...]) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if message is not None:
        monkeypatch.setenv(VARIABLE, message)
    assert chosen_layers() == expected
    for kind in KERNELS:
        possible, reason = runs_on(kind, None)
        on_hopper = message is None and kind.endswith("-experts") and "fp8" not in kind
        assert possible == (kind in expected and not on_hopper)
        assert possible or on_hopper or reason == f"{VARIABLE} leaves out {kind}"


@pytest.mark.parametrize("message", ["int4", "int8 fp8"])
def test_unknown_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    monkeypatch.setenv(VARIABLE, message)
    with pytest.raises(ValueError, match=f"{VARIABLE}: expected all, none, or some of int8, fp8, fp8-block"):
        chosen_layers()


@pytest.mark.parametrize("message", ["all,int8", "all,none", "int4, none"])
def test_all_and_none_stand_alone(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    monkeypatch.setenv(VARIABLE, message)
    with pytest.raises(ValueError, match=f"{VARIABLE}: expected all and none to stand alone, got '{message}'"):
        chosen_layers()


@pytest.mark.parametrize(
    ("kind", "capability", "reason"),
    [
        ("int8", 70, "int8 needs compute capability 7.5 or newer, this is 7.0"),
        ("fp8", 80, "fp8 needs compute capability 8.9 or newer, this is 8.0"),
        ("w4a16", 100, "epiloq has no kernels of its own for compute capability 10.0"),
        ("int8", 75, None),
        ("w8a16", 89, None),
        ("fp8-block", 90, None),
        ("w4a16-experts", 75, None),
        ("int8-experts", 75, "int8-experts needs compute capability 8.0 or newer, this is 7.5"),
        ("fp8-block-experts", 80, "fp8-block-experts needs compute capability 8.9 or newer, this is 8.0"),
    ],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, kind: str, capability: int, reason: str | None) -> None:
    monkeypatch.setenv(VARIABLE, "all")
    monkeypatch.setattr(_core, "built_archs", lambda: ["sm75", "sm80", "sm89", "sm90"])
    assert runs_on(kind, capability) == (reason is None, reason)
    monkeypatch.setattr(_core, "built_archs", lambda: ["sm90"])
    assert runs_on("int8", 80) == (False, "this build of epiloq has no kernels for sm75, sm80")
    assert runs_on("int8", 90) == (True, None)


@pytest.mark.parametrize("kind", ["w4a16-experts", "w8a16-experts", "int8-experts", "mxfp4-experts", "nvfp4-experts"])
@pytest.mark.parametrize("capability", [80, 89, None])
def test_experts_run_by_default_where_they_were_compared(
    monkeypatch: pytest.MonkeyPatch, kind: str, capability: int | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(_core, "built_archs", lambda: ["sm75", "sm80", "sm89", "sm90"])
    assert runs_on(kind, 90) == (True, None)
    message = f"{kind} was compared on compute capability 9.0 alone; {VARIABLE}={kind} selects epiloq's"
    assert runs_on(kind, capability) == (False, message)


def test_the_entry_points_are_functions_that_bring_no_engine_along() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the project's description is in the checkout only")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    for group in [name for name in groups if name != "cmake.root"]:
        for name, value in groups[group].items():
            assert callable(EntryPoint(name, value, group).load())
            module = value.partition(":")[0]
            code = f"import {module}, sys; print({{'vllm', 'sglang', 'transformers'}} & set(sys.modules))"
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert run.stdout.strip() == "set()", (module, run.stdout)
