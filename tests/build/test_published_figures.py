"""README's and docs/performance.md's tables are those of benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import documents

RESULTS = documents.ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="the documentation is in the checkout only")


def rows_of(page: Path) -> list[list[str]]:
    """The cells of every table row."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def is_published(numbers: list[str], page: str = "docs/performance.md") -> bool:
    """Whether some row ends in these cells."""
    return any(row[-len(numbers) :] == numbers for row in rows_of(documents.ROOT / page))


def summaries(name: str, peer: str) -> Iterator[tuple[str, list[str]]]:
    """Of each variant the ratios to a peer by M."""
    found: dict[str, list[str]] = {}
    for row in load(name)["summary"]:
        if row["group"].startswith("M = ") and peer in row["peers"]:
            found.setdefault(row["variant"], []).append(f"{row['peers'][peer]:.2f}")
    yield from found.items()


def test_products() -> None:
    record = load("nvidia-h200/products")
    for row in record["rows"]:
        assert is_published([f"{ratio:.2f}" for ratio in row["ratio"].values()]), row
    short = [m for m in record["rows"][0]["ratio"] if m not in ("128", "512")]
    readme = [row for row in rows_of(documents.ROOT / "README.md") if len(row) == 1 + len(short) and "." in row[1]]
    known = [[f"{row['ratio'][m]:.2f}" for m in short] for row in record["rows"]]
    assert len(readme) == 4 and all(row[1:] in known for row in readme)


def test_models() -> None:
    for row in load("nvidia-h200/models")["rows"]:
        numbers = list(row["tokens_per_s"].values())
        assert is_published([f"{n:,}" for n in numbers]) or is_published([str(n) for n in numbers]), row


@pytest.mark.parametrize(
    ("name", "peer"),
    [("nvidia-h200/layers", "bf16"), ("nvidia-h100/weight_only", "dense"), ("nvidia-h100/online_quant", "bf16")],
)
def test_ratios_by_m(name: str, peer: str) -> None:
    for variant, ratios in summaries(name, peer):
        assert is_published(ratios), (variant, ratios)


def test_experts() -> None:
    for row in load("nvidia-h200/experts")["summary"]:
        if row["operation"] == "grouped_mm" and row["group"].startswith("M = ") and "ragged" not in row["variant"]:
            peers = [row["peers"].get(peer) for peer in ("separate", "_grouped_mm", "_scaled_grouped_mm", "triton")]
            numbers = [f"{ratio:.2f}" if ratio else "" for ratio in peers]
            assert is_published([*numbers, f"{row['percent_of_floor']:.0f}"]), row


def test_there_is_little_and_all_of_it_is_cited() -> None:
    files = list(RESULTS.rglob("*.*"))
    assert sum(file.stat().st_size for file in files) < 300_000
    text = (documents.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert [file.name for file in files if f"`{file.name}`" not in text] == []
    for file in files:
        assert load(str(file.relative_to(RESULTS).with_suffix("")))["commit"][:7] in text, file
