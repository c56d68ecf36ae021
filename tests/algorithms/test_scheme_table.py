"""The table of docs/guide/choosing_a_scheme.md, from rows that are made up."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the tool has a command line")
scheme_table = pytest.importorskip("scheme_table", reason="the repository's tools are not here")
for needed in ("safetensors", "transformers"):
    pytest.importorskip(needed, reason="the rows need the extra hf")

import algorithm_rows
from command_line import ROUND
from tiny_teacher import save, tiny_model

ROOT = Path(__file__).parents[2]


def row(scheme: str, perplexity: float, dynamic: int = 0) -> dict[str, Any]:
    return {
        "scheme": scheme,
        "perplexity": perplexity,
        "kl": 0.07,
        "bytes": 174_000_000,
        "layers": 210,
        "dynamic": dynamic,
    }


FOUND: dict[str, Any] = {
    scheme_table.FLOAT: {"perplexity": 16.0, "bytes": 538_000_000},
    "w4a16-g64 rtn": row("w4a16-g64", 20.0),
    "w4a16-g64 gptq": row("w4a16-g64", 17.0),
    "w8a8-int8-static smoothquant --keep-dynamic auto": row("w8a8-int8-static", 16.8, 12),
    "speed": {"w4a16-g64": [0.5, 2.25]},
}


def cells(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    assert len({len(line) for line in lines}) == 1
    return {line[0]: line[1:] for line in lines}


def test_the_gap_is_that_between_rounding_and_the_model() -> None:
    found = cells(scheme_table.table(FOUND))
    assert found["floating point"][:5] == ["16.00", "+0.0 %", "", "", "538"]
    assert found["`w4a16-g64 rtn`"] == ["20.00", "+25.0 %", "0.0700", "", "174", "0.50x", "2.25x"]
    assert found["`w4a16-g64 gptq`"][:4] == ["17.00", "+6.2 %", "0.0700", "75 %"]
    kept = found["`w8a8-int8-static smoothquant --keep-dynamic auto` (12 of 210 layers)"]
    assert kept == ["16.80", "+5.0 %", "0.0700", "", "174", "", ""]


def test_rows_that_are_missing_are_named() -> None:
    said = scheme_table.table(FOUND).rpartition("Not measured: ")[2]
    names = {name.strip("`.") for name in said.strip().split(", ")}
    assert names == {row.name for row in scheme_table.ROWS} - set(FOUND)


def test_writing_keeps_the_rest(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    scheme_table.keep(rows, FOUND)
    assert json.loads(rows.read_text()) == FOUND == scheme_table.read(rows)
    doc = tmp_path / "doc.md"
    doc.write_text(f"before\n{scheme_table.BEGIN}\nold\n{scheme_table.END}\nafter\n")
    for _ in range(2):
        scheme_table.write(doc, rows)
        text = doc.read_text()
        assert text.startswith(f"before\n{scheme_table.BEGIN}\n| scheme") and text.endswith(
            f"{scheme_table.END}\nafter\n"
        )
        assert "old" not in text and text.count(scheme_table.BEGIN) == 1


def test_the_document_has_the_table_of_the_kept_figures() -> None:
    text = (ROOT / "docs" / "guide" / "choosing_a_scheme.md").read_text(encoding="utf-8")
    assert text.index(scheme_table.BEGIN) < text.index(scheme_table.END)
    inside = text.partition(scheme_table.BEGIN)[2].partition(scheme_table.END)[0]
    found = scheme_table.read(scheme_table.RESULTS)
    assert inside.strip() == scheme_table.table(found)
    inside = text.partition(scheme_table.SECOND)[2].partition(scheme_table.END)[0]
    assert inside.strip() == algorithm_rows.table(found[scheme_table.ALGORITHMS])


def test_a_row_for_each_algorithm() -> None:
    found = {
        "w4a16-g64 gptq": {"perplexity": 17.61, "kl": 0.07706, "seconds": 66},
        "w2a16-g32 gptq, first blocks": {"perplexity": 40.0, "kl": 0.9, "seconds": 90},
        "w4a16-g64 gptq, first blocks": {"perplexity": 17.5, "kl": 0.07, "seconds": 60},
    }
    rows = cells(algorithm_rows.table(found))
    assert rows["whole model, gptq"] == ["0.0771 (17.61)", "", "", "", "66"]
    assert rows["first 3 blocks, gptq"] == ["0.0700", "", "", "0.9000", "60 to 90"]
    assert len(rows) == 4


def test_a_row_is_measured(tmp_path: Path) -> None:
    """On a tiny model; another package's row needs the package."""
    save(tmp_path / "model", tiny_model(**ROUND))
    for name in ("calibration", "evaluation"):
        (tmp_path / f"{name}.txt").write_text("".join(chr(97 + i * i % 26) for i in range(4000)))
    row = algorithm_rows.measure(tmp_path / "model", tmp_path, algorithm_rows.Row("w2a16-g32", "gptq", True))
    assert row is not None and row["kl"] > 0 and row["perplexity"] > 1
    for peer, package in (("llm-compressor", "llmcompressor"), ("GPTQModel", "gptqmodel")):
        if importlib.util.find_spec(package) is None:
            assert algorithm_rows.measure(tmp_path / "model", tmp_path, algorithm_rows.Row("w4a16-g64", peer)) is None
