"""Measures schemes and algorithms on a model, for docs/accuracy.md and docs/guide/choosing_a_scheme.md.

    python tools/figures/scheme_table.py all MODEL --work DIR

cuts the text, measures every missing row, and writes the documents' tables. The steps by themselves:

    python tools/figures/scheme_table.py text TEXTS
    python tools/figures/scheme_table.py measure MODEL --texts TEXTS --work DIR [--rows w4a16-g64,…] [--device cuda]
    python tools/figures/scheme_table.py algorithms MODEL --texts TEXTS
    python tools/figures/scheme_table.py budget MODEL --texts TEXTS --work DIR
    python tools/figures/scheme_table.py speed MODEL --texts TEXTS --work DIR
    python tools/figures/scheme_table.py write

Rows are written to benchmarks/results/accuracy (`--results`) as they are measured, and an interrupted run can be
repeated. `speed` times one output directory of each measured scheme alternately with the floating-point model;
`algorithms` and `budget` are separate tables, see algorithm_rows.py and budget_rows.py. For the tables of a model whose
weights were never quantised, run

    python tools/figures/small_teacher.py MODEL
    python tools/figures/scheme_table.py teacher MODEL --work DIR
    python tools/figures/scheme_table.py encoder --work DIR
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scheme_rows import ALGORITHMS, BUDGET, FLOAT, ROWS, TEACHER_ROWS, Row, summary, table

app = typer.Typer(add_completion=False, help=__doc__)
WINDOWS, LENGTH, EVALUATED = 32, 512, 6 * 512
ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "docs/accuracy.md", ROOT / "docs/guide/choosing_a_scheme.md"]
RESULTS = ROOT / "benchmarks/results/accuracy/smollm2-135m.json"
ENCODER_RESULTS = ROOT / "benchmarks/results/accuracy/encoder.json"
TEACHER_RESULTS = ROOT / "benchmarks/results/accuracy/small_teacher.json"
BEGIN, END = "<!-- made by tools/figures/scheme_table.py{} -->", "<!-- end -->"
Texts = Annotated[Path, typer.Option(help="The folder that `text` made.")]
Work = Annotated[Path, typer.Option(help="The folder for outputs.")]
Results = Annotated[Path, typer.Option(help="The file of results.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Documents = Annotated[list[Path], typer.Argument(help="Documents with the tables' marks.")]


def epiloq(*arguments: object) -> None:
    """Run the command line at low priority in a separate process, so that its peak memory is measured alone."""
    command = ["nice", "-n", "10", sys.executable, "-m", "epiloq", *map(str, arguments)]
    print(" ".join(command[5:]), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read(results: Path) -> dict[str, Any]:
    """Read the results: figures by row, and common ones."""
    return json.loads(results.read_text()) if results.exists() else {}


def keep(results: Path, found: dict[str, Any]) -> None:
    """Replace the file atomically, with a line per row."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
    aside = results.with_suffix(".part")
    results.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text(f"{{\n{lines}\n}}\n")
    aside.replace(results)


def add(results: Path, name: str, row: dict[str, Any], part: str = "") -> None:
    """Add a row to a part of the file, which is read again because another process may have changed it."""
    found = read(results)
    (found.setdefault(part, {}) if part else found)[name] = row
    keep(results, found)
    print(name, row, flush=True)


@app.command()
def text(texts: Path) -> None:
    """Cut Python's language reference: the first quarter for evaluation, the second half for calibration."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics.values())
    texts.mkdir(parents=True, exist_ok=True)
    (texts / "evaluation.txt").write_text(whole[: len(whole) // 4], encoding="utf-8")
    (texts / "calibration.txt").write_text(whole[len(whole) // 2 :], encoding="utf-8")


def evaluate(folder: Path, teacher: Path, texts: Path, work: Path, device: str) -> dict[str, Any]:
    file = work / "eval.json"
    text = ("--text", texts / "evaluation.txt", "--tokens", EVALUATED)
    epiloq("eval", folder, *text, "--kl", teacher, "--device", device, "--json", file)
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def quantise(
    model: Path, row: Row, texts: Path, work: Path, output: Path, device: str, windows: int = WINDOWS
) -> dict[str, Any]:
    file = work / "quantize.json"
    options: list[object] = ["--scheme", row.scheme] if row.scheme else []
    options += ["--algorithm", row.algorithm, *row.options, "--device", device]
    if row.algorithm != "rtn" or "static" in row.scheme:
        options += ["--calibration", texts / "calibration.txt", "--windows", windows, "--length", LENGTH]
    epiloq("quantize", model, *options, "--output", output, "--json", file)
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def schemes(model: Path, texts: Path, work: Path, rows: Sequence[Row], results: Path, device: str = "cpu") -> None:
    """Measure the rows that are missing from the results."""
    work.mkdir(parents=True, exist_ok=True)
    if FLOAT not in read(results):
        seen = evaluate(model, model, texts, work, device)
        add(results, FLOAT, {"perplexity": seen["perplexity"], "kl": 0.0, "bytes": seen["file_bytes"]})
    for row in rows:
        if row.name in read(results):
            continue
        output = work / row.name.replace(" ", "_")
        shutil.rmtree(output, ignore_errors=True)
        made = quantise(model, row, texts, work, output, device)
        seen = evaluate(output, model, texts, work, device)
        figures = {
            "scheme": row.scheme,
            "perplexity": seen["perplexity"],
            "kl": seen["kl"],
            "bytes": made["bytes_after"],
            "seconds": made["stages"]["quantise"],
            "memory": made["peak_memory_bytes"],
            "layers": len(made["layer_errors"]),
            "dynamic": sum(errors["kept_dynamic"] for errors in made["input_errors"].values()),
        }
        add(results, row.name, figures)
        if any(other.scheme == row.scheme for other in rows[: rows.index(row)]):
            shutil.rmtree(output)  # `speed` needs one output per scheme


@app.command()
def measure(
    model: Path,
    texts: Texts,
    work: Work,
    rows: Annotated[str, typer.Option(help="Schemes, with commas.")] = "",
    results: Results = RESULTS,
    device: Device = "cpu",
) -> None:
    """Measure the rows that are missing from the results."""
    asked = [row for row in ROWS if not rows or row.scheme in rows.split(",")]
    schemes(model, texts, work, asked, results, device)


@app.command()
def algorithms(model: Path, texts: Texts, results: Results = RESULTS) -> None:
    """Measure the missing rows of the table of algorithms."""
    import algorithm_rows

    _algorithms(model, texts, algorithm_rows.ROWS, algorithm_rows.COUNT, results)


def _algorithms(model: Path, texts: Path, rows: Sequence[Any], count: int, results: Path) -> None:
    import algorithm_rows

    for row in rows:
        known = read(results).get(ALGORITHMS, {})
        seen = None if row.name in known else algorithm_rows.measure(model, texts, row, count)
        if seen is not None:
            add(results, row.name, seen, ALGORITHMS)


@app.command()
def budget(model: Path, texts: Texts, work: Work, results: Results = RESULTS) -> None:
    """Measure the missing rows of the table of budgets."""
    import budget_rows

    work.mkdir(parents=True, exist_ok=True)
    for pair in budget_rows.PAIRS:
        limit: tuple[str, ...] = ()
        for which, scheme, options in (("uniform", pair.scheme, pair.options), ("chosen", "", budget_rows.AUTO)):
            name = f"{pair.name}, {which}"
            known = read(results).get(BUDGET, {}).get(name)
            if known is None:
                output = work / "budget"
                shutil.rmtree(output, ignore_errors=True)
                row = Row(scheme, "gptq", (*limit, *options))
                made = quantise(model, row, texts, work, output, "cpu", budget_rows.WINDOWS)
                seen = evaluate(output, model, texts, work, "cpu")
                known = {"perplexity": seen["perplexity"], "kl": seen["kl"], "bytes": made["bytes_after"]}
                add(results, name, known, BUDGET)
            limit = ("--bytes", f"{known['bytes']}B")


@app.command()
def teacher(model: Path, work: Work, results: Results = TEACHER_RESULTS) -> None:
    """Cut the text, measure the missing rows of small_teacher.py's model, and write its tables."""
    import algorithm_rows

    texts = work / "texts"
    text(texts)
    schemes(model, texts, work, TEACHER_ROWS, results)
    budget(model, texts, work, results)
    _algorithms(model, texts, algorithm_rows.TEACHER_ROWS, algorithm_rows.TEACHER_COUNT, results)
    write()


@app.command()
def encoder(work: Work, results: Results = ENCODER_RESULTS) -> None:
    """Cut the text, measure the missing rows of the encoder in a package, and write its table."""
    import encoder_rows

    texts = work / "texts"
    text(texts)
    model = encoder_rows.unpack(work / "encoder")
    for row in encoder_rows.ROWS:
        if row.name not in read(results):
            add(results, row.name, encoder_rows.measure(model, texts, row))
    write()


@app.command()
def speed(model: Path, texts: Texts, work: Work, results: Results = RESULTS) -> None:
    """Time each scheme alternately with the floating-point model on this machine."""
    from epiloq.cli.common import quiet

    quiet()
    from epiloq.demo import speed as timing
    from epiloq.evaluation.text import load_tokenizer, read_texts, windows
    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.formats.io.model import load

    found = read(results)
    baseline, _ = load(Checkpoint(model))
    prompt = windows(load_tokenizer(model), read_texts(texts / "evaluation.txt"), LENGTH)[0]
    for row in ROWS:
        folder = work / row.name.replace(" ", "_")
        if row.name in found and folder.is_dir():
            took = timing.measure(load(Checkpoint(folder))[0], baseline, prompt)
            found.setdefault("speed", {})[row.scheme] = [took.prefill_speedup, took.decode_speedup]
            keep(results, found)


def tables(found: dict[str, Any], trained: dict[str, Any], encoded: dict[str, Any]) -> dict[str, str]:
    """Return all tables, of the model, of the one trained here and of the encoder, by the suffix of their marks."""
    import algorithm_rows
    import budget_rows
    import encoder_rows

    return {
        "": table(found),
        " summary": summary(found),
        " algorithms": algorithm_rows.table(found.get(ALGORITHMS, {})),
        " budget": budget_rows.table(found.get(BUDGET, {})),
        " teacher": table(trained, TEACHER_ROWS) if trained else "",
        " teacher algorithms": algorithm_rows.table(trained.get(ALGORITHMS, {}), algorithm_rows.TEACHER_ROWS),
        " teacher budget": budget_rows.table(trained.get(BUDGET, {})),
        " encoder": encoder_rows.table(encoded),
    }


@app.command()
def write(documents: Documents = DOCUMENTS, results: Results = RESULTS) -> None:
    """Write the tables into documents, between their marks."""
    made = tables(read(results), read(TEACHER_RESULTS), read(ENCODER_RESULTS))
    for document in documents:
        whole = document.read_text(encoding="utf-8")
        for part, rows in made.items():
            before, mark, rest = whole.partition(BEGIN.format(part))
            if mark:
                whole = f"{before}{mark}\n{rows}\n{END}{rest.partition(END)[2]}"
        document.write_text(whole, encoding="utf-8")


@app.command("all")
def everything(
    model: Path,
    work: Work,
    results: Results = RESULTS,
    device: Device = "cpu",
) -> None:
    """Cut the text, measure the missing rows, and write the documents' tables."""
    texts = work / "texts"
    text(texts)
    measure(model, texts, work, results=results, device=device)
    algorithms(model, texts, results)
    budget(model, texts, work, results)
    write(results=results)


if __name__ == "__main__":
    app()
