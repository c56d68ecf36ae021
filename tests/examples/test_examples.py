"""The programs in examples/ do what their headers say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are in the checkout only")


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the example's `main` returns."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as when Python runs a file there
    return runpy.run_path(str(path))["main"]()


def test_fp8_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < run("fp8_experts", monkeypatch) < 0.08


@pytest.mark.slow
def test_int8_cnn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("int8_cnn", monkeypatch)
    assert found["float: right"] > 0.9 and found["same class"] > 0.97
    assert found["int8: MB"] < 0.35 * found["float: MB"]


@pytest.mark.slow
def test_gptq_language_model(monkeypatch: pytest.MonkeyPatch, epiloq_in_transformers: None) -> None:
    for package in ("typer", "safetensors", "transformers"):
        pytest.importorskip(package)
    found = run("gptq_language_model", monkeypatch)
    plain, nearest, gptq = found.values()
    assert plain < 2  # a model that knows nothing has 256
    assert plain < nearest and gptq - plain < 0.5 * (nearest - plain)


@pytest.mark.slow
def test_lora_on_4bit(monkeypatch: pytest.MonkeyPatch, epiloq_in_transformers: None) -> None:
    for package in ("peft", "transformers"):
        pytest.importorskip(package)
    found = run("lora_on_4bit", monkeypatch)
    before, quantized_before, exact, quantized, again = found.values()
    assert exact < 0.6 * before and again == quantized
    # What the adapter gains on 4 bits is what it gains on floats, within a tenth.
    assert abs((quantized_before - quantized) - (before - exact)) < 0.1 * (before - exact)
