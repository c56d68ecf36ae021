"""Tables of whole models for README.md and docs/guide/whole_models.md, from a record of ``epiloq bench --model``.

    python tools/figures/model_table.py keep models.json RECORD --commit 3e9a0d5
    python tools/figures/model_table.py write RECORD README.md docs/guide/whole_models.md

A record is of one shape, and has either compiled models or others; tables of another kind stay. A record with a few
layers is extrapolated to all: time and size of one layer times their number, plus embedding, last norm and head as
measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from epiloq.bench.models.plan import SHAPES, Measured

app = typer.Typer(add_completion=False, help=__doc__)
BEGIN, END = "<!-- made by tools/figures/model_table.py: {} -->", "<!-- end -->"
KERNELS, NAME = 12, 90  # kernels kept per contender, and characters kept of each name


class Record(NamedTuple):
    shape: str
    rows: list[Measured]


def read(path: Path) -> Record:
    found = json.loads(path.read_text(encoding="utf-8"))
    shape = re.findall(r"--model (\S+)", found["environment"]["command"])[-1]
    return Record(shape, [Measured(**row) for row in found["rows"]])


def label(row: Measured) -> str:
    """Label of a contender in tables."""
    parts = [] if row.head is None else [f"head `{row.head}`"]
    parts += [] if row.cache is None else [f"{row.cache} cache"]
    parts += [f"`{pattern}` in bf16" for pattern in row.ignore]
    name = "bf16" if row.scheme == "none" else f"`{row.scheme}`"
    return ", ".join((name, *parts))


def contenders(rows: list[Measured]) -> dict[str, dict[tuple[str, str, int], Measured]]:
    """Group rows by contender, then by mode, phase and batch, in the record's order; only optimised ones."""
    found: dict[str, dict[tuple[str, str, int], Measured]] = {}
    for row in rows:
        if row.optimized or row.scheme == "none":
            found.setdefault(label(row), {})[row.mode, row.phase, row.batch] = row
    return found


def lines(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def short(record: Record) -> str:
    """Format tokens per second and gigabytes of compiled models with all layers of their shape."""
    rows, layers = record.rows, SHAPES[record.shape]["num_hidden_layers"]
    phases = {
        ("compile", "decode", 1): "decode, batch 1",
        ("compile", "decode", 16): "batch 16",
        ("compile", "prefill", 1): "prefill of 2048",
    }
    decode = next(iter(phases))
    table, base = [], None
    for name, own in contenders(rows).items():
        whole = {phase: own[phase].of_layers(layers) for phase in phases if phase in own}
        if len(whole) < len(phases):
            continue
        base = whole if base is None else base
        cells = [f"{whole[decode].weight_megabytes / 1e3:.1f}"]
        for phase in phases:
            rate, ratio = whole[phase].tokens_per_second, base[phase].milliseconds / whole[phase].milliseconds
            cells.append(f"{rate:,.0f}" + ("" if whole is base else f" ({ratio:.2f}x)"))
        table.append([name, *cells])
    return lines(["", "weights, GB", *phases.values()], table)


def by_layer(record: Record) -> str:
    """Format microseconds per layer, without embedding, last norm and head."""
    phases = {
        ("compile", "decode", 1): "decode, batch 1",
        ("compile", "decode", 16): "batch 16",
        ("compile", "prefill", 1): "prefill of 2048",
    }
    table = []
    for name, own in contenders(record.rows).items():
        table.append([name, *(f"{own[phase].us_a_layer:,.0f}" if phase in own else "" for phase in phases)])
    return lines(["µs a layer", *phases.values()], table)


def by_mode(record: Record) -> str:
    """Format tokens per second of decoding without `torch.compile`, as loaded and optimised."""
    steps = {
        ("eager", 1): "eager, batch 1",
        ("eager", 16): "batch 16",
        ("graph", 1): "CUDA graph, batch 1",
        ("graph", 16): "batch 16",
    }
    found: dict[str, dict[tuple[str, int], Measured]] = {}
    for row in record.rows:
        name = label(row) + ("" if row.optimized or row.scheme == "none" else ", as loaded")
        if row.phase == "decode":
            found.setdefault(name, {})[row.mode, row.batch] = row
    table, base = [], None
    for name, own in found.items():
        if not own.keys() >= steps.keys():
            continue
        base = own if base is None else base
        cells = [f"{own[step].tokens_per_second:,.0f}" for step in steps]
        if own is not base:
            ratios = [base[step].milliseconds / own[step].milliseconds for step in steps]
            cells = [f"{cell} ({ratio:.2f}x)" for cell, ratio in zip(cells, ratios, strict=True)]
        table.append([name, *cells])
    return lines(["decoded tokens/s", *steps.values()], table)


class Table(NamedTuple):
    format: Callable[[Record], str]
    shape: str
    compiled: bool = True


TABLES = {
    "models": Table(short, "llama-3-8b"),
    "layers": Table(by_layer, "llama-3-8b"),
    "modes": Table(by_mode, "llama-3-8b", compiled=False),
    "mixtures": Table(short, "qwen3-30b-a3b"),
    "layers of mixtures": Table(by_layer, "qwen3-30b-a3b"),
    "GPT-OSS": Table(short, "gpt-oss-20b"),
    "layers of GPT-OSS": Table(by_layer, "gpt-oss-20b"),
}


def written(text: str, record: Record) -> str:
    """Return a document with the tables of this record's kind regenerated."""
    compiled = any(row.mode == "compile" for row in record.rows)
    for name, table in TABLES.items():
        before, mark, rest = text.partition(BEGIN.format(name))
        if mark and (table.shape, table.compiled) == (record.shape, compiled):
            after = rest.partition(END)[2]
            text = f"{before}{mark}\n{table.format(record)}\n{END}{after}"
    return text


@app.command()
def keep(record: Path, to: Path, commit: Annotated[str, typer.Option(help="The measured commit.")]) -> None:
    """Reduce a record to what the tables and a reader need."""
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    shares: list[dict[str, Any]] = []
    for name in dict.fromkeys(share["contender"] for share in found["shares"]):
        shares += [share for share in found["shares"] if share["contender"] == name][:KERNELS]
    for share in shares:
        share["kernel"] = share["kernel"][:NAME]
    kept = {"commit": commit, **found, "shares": shares}
    to.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


@app.command()
def write(record: Path, documents: list[Path]) -> None:
    """Write the tables into documents, between their marks."""
    found = read(record)
    for document in documents:
        document.write_text(written(document.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    app()
