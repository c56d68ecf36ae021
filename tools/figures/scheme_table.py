"""Measures schemes and algorithms on a model, for docs/guide/choosing_a_scheme.md.

    python tools/figures/scheme_table.py all MODEL --work DIR

cuts the text, measures every row that is missing, and writes the document's tables. Or one after the other:

    python tools/figures/scheme_table.py text TEXTS
    python tools/figures/scheme_table.py measure MODEL --texts TEXTS --work DIR [--rows w4a16-g64,…] [--device cuda]
    python tools/figures/scheme_table.py algorithms MODEL --texts TEXTS
    python tools/figures/scheme_table.py speed MODEL --texts TEXTS --work DIR
    python tools/figures/scheme_table.py write docs/guide/choosing_a_scheme.md

Rows are kept in benchmarks/results/accuracy (`--results`) as they are measured: run it again to go on. `speed` times,
for each scheme that was measured, one output directory beside the floating-point model; `algorithms` is the second
table, see algorithm_rows.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

app = typer.Typer(add_completion=False, help=__doc__)
WINDOWS, LENGTH, EVALUATED = 32, 512, 6 * 512
FLOAT = "floating point"
# SmolLM2's 576 channels are no multiple of 128, which only this format can say.
SHORT_GROUPS = ("--format", "gptq")
TUNED = ("--tune", "64")
ROOT = Path(__file__).parents[2]
DOCUMENT, RESULTS = ROOT / "docs/guide/choosing_a_scheme.md", ROOT / "benchmarks/results/accuracy/smollm2-135m.json"
ALGORITHMS = "algorithms"
NO_ROWS = ("speed", "about", ALGORITHMS)
"""What the figures' file holds beside rows."""
BEGIN, END = "<!-- made by tools/figures/scheme_table.py -->", "<!-- end -->"
SECOND = "<!-- made by tools/figures/scheme_table.py algorithms -->"
Texts = Annotated[Path, typer.Option(help="The folder that `text` made.")]
Work = Annotated[Path, typer.Option(help="Where the outputs are kept.")]
Results = Annotated[Path, typer.Option(help="Where the figures are kept.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


class Row(NamedTuple):
    """A scheme by an algorithm; the cheap ones first."""

    scheme: str
    algorithm: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.scheme, self.algorithm, *self.options))


ROWS = (
    *(Row(scheme, "rtn") for scheme in ("w8a16", "w8a8-int8", "w8a8-int8-azp")),
    *(Row(scheme, "rtn") for scheme in ("w4a16-g64", "w4a16-g32")),
    Row("w4a16-g128", "rtn", SHORT_GROUPS),
    Row("w8a8-int8", "smoothquant"),
    Row("w8a8-int8-static", "smoothquant", ("--keep-dynamic", "auto")),
    Row("w4a16-g64", "gptq"),
    Row("w4a16-g64", "awq+gptq"),
    Row("w4a16-g64", "awq"),
    Row("w4a16-g64", "gptq", TUNED),
    *(Row("w4a16-g64", algorithm) for algorithm in ("gptq+refine", "gptq-guided", "awq+gptq-guided")),
    Row("w8a8-int8-static", "smoothquant-search"),
    Row("w8a8-int8-static", "smoothquant-search", TUNED),
    Row("w8a8-int8", "smoothquant", TUNED),
    Row("w4a16-g32", "gptq"),
    Row("w4a16-g32", "awq+gptq"),
    Row("w4a16-g32", "awq"),
    Row("w8a8-int8-static", "smoothquant"),
    Row("w8a8-int8-static", "smoothquant-search", ("--keep-dynamic", "auto")),
    Row("w8a8-int8", "smoothquant-search"),
    Row("w8a8-int8", "smoothquant+gptq"),
    Row("w8a8-int8-azp", "smoothquant"),
    Row("w4a16-g128", "gptq", SHORT_GROUPS),
    Row("w4a16-g128", "awq+gptq", SHORT_GROUPS),
    *(Row("fp8-block", algorithm) for algorithm in ("rtn", "gptq")),
    *(Row(scheme, algorithm) for scheme in ("w4a8-block-g32", "w4a8-block") for algorithm in ("rtn", "gptq")),
    *(Row(scheme, "rtn") for scheme in ("fp8-token", "fp8", "w8a8-block")),
    # The epiloq format alone has these short groups.
    *(Row("w4a8-fp8", algorithm) for algorithm in ("rtn", "gptq")),
)


def epiloq(*arguments: object) -> None:
    """Run the command line, niced, in a process of its own, whose peak memory is then its own too."""
    command = ["nice", "-n", "10", sys.executable, "-m", "epiloq", *map(str, arguments)]
    print(" ".join(command[5:]), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read(results: Path) -> dict[str, Any]:
    """Figures by row, and of all together."""
    return json.loads(results.read_text()) if results.exists() else {}


def keep(results: Path, found: dict[str, Any]) -> None:
    """Replace the file as a whole; a row takes one line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
    aside = results.with_suffix(".part")
    results.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text(f"{{\n{lines}\n}}\n")
    aside.replace(results)


@app.command()
def text(texts: Path) -> None:
    """Cut Python's language reference in two: the first quarter to evaluate on, the second half to calibrate with."""
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


def quantise(model: Path, row: Row, texts: Path, work: Path, output: Path, device: str) -> dict[str, Any]:
    file = work / "quantize.json"
    options: list[object] = ["--scheme", row.scheme, "--algorithm", row.algorithm, *row.options]
    options += ["--device", device]
    if row.algorithm != "rtn" or "static" in row.scheme:
        options += ["--calibration", texts / "calibration.txt", "--windows", WINDOWS, "--length", LENGTH]
    epiloq("quantize", model, *options, "--output", output, "--json", file)
    return json.loads(file.read_text())  # type: ignore[no-any-return]


@app.command()
def measure(
    model: Path,
    texts: Texts,
    work: Work,
    rows: Annotated[str, typer.Option(help="Schemes, with commas.")] = "",
    results: Results = RESULTS,
    device: Device = "cpu",
) -> None:
    """Measure the rows that are missing, one after the other."""
    work.mkdir(parents=True, exist_ok=True)
    found = read(results)
    if FLOAT not in found:
        seen = evaluate(model, model, texts, work, device)
        found[FLOAT] = {"perplexity": seen["perplexity"], "kl": 0.0, "bytes": seen["file_bytes"]}
        keep(results, found)
    for row in ROWS:
        if row.name in found or (rows and row.scheme not in rows.split(",")):
            continue
        output = work / row.name.replace(" ", "_")
        shutil.rmtree(output, ignore_errors=True)
        made = quantise(model, row, texts, work, output, device)
        seen = evaluate(output, model, texts, work, device)
        dynamic = sum(errors["kept_dynamic"] for errors in made["input_errors"].values())
        found[row.name] = {
            "scheme": row.scheme,
            "perplexity": seen["perplexity"],
            "kl": seen["kl"],
            "bytes": made["bytes_after"],
            "seconds": made["stages"]["quantise"],
            "memory": made["peak_memory_bytes"],
            "layers": len(made["layer_errors"]),
            "dynamic": dynamic,
        }
        keep(results, found)
        if any(other.scheme == row.scheme for other in ROWS[: ROWS.index(row)]):
            shutil.rmtree(output)  # `speed` needs one for each scheme.
        print(row.name, found[row.name], flush=True)


@app.command()
def algorithms(model: Path, texts: Texts, results: Results = RESULTS) -> None:
    """Measure what is missing of the second table."""
    import algorithm_rows

    found = read(results)
    rows = found.setdefault(ALGORITHMS, {})
    for row in algorithm_rows.ROWS:
        seen = None if row.name in rows else algorithm_rows.measure(model, texts, row)
        if seen is not None:
            rows[row.name] = seen
            keep(results, found)
            print(row.name, seen, flush=True)


@app.command()
def speed(model: Path, texts: Texts, work: Work, results: Results = RESULTS) -> None:
    """Time each scheme in turns with the floating-point model, on this machine as it is."""
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


def line(name: str, row: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """A row's cells."""
    exact = found[FLOAT]["perplexity"]
    cells = [f"{row['perplexity']:.2f}", f"{100 * (row['perplexity'] / exact - 1):+.1f} %"]
    cells.append(f"{row['kl']:.4f}" if "kl" in row and name != FLOAT else "")
    nearest = next((r for n, r in found.items() if n.startswith(f"{row.get('scheme')} rtn")), None)
    closed = nearest is not None and nearest is not row and row["scheme"].startswith("w4")
    gap = nearest["perplexity"] - exact if nearest else 0.0
    cells.append(f"{100 * (1 - (row['perplexity'] - exact) / gap):.0f} %" if closed else "")
    cells.append(f"{row['bytes'] / 1e6:.0f}" if "bytes" in row else "")
    took = found.get("speed", {}).get(row.get("scheme"))
    cells += ["", ""] if took is None else [f"{took[0]:.2f}x", f"{took[1]:.2f}x"]
    kept = f" ({row['dynamic']} of {row['layers']} layers)" if row.get("dynamic") else ""
    return [f"`{name}`{kept}" if name != FLOAT else name, *cells]


def table(found: dict[str, Any]) -> str:
    """The table in Markdown, and what was not measured."""
    heads = ("scheme, algorithm", "perplexity", "change", "KL", "gap closed", "MB", "prefill", "decode")
    lines = [f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|"]
    known = {row.name for row in ROWS} | {name for name in found if name not in (FLOAT, *NO_ROWS)}
    names = [FLOAT, *sorted(known, key=lambda name: (name.split()[0], len(name), name))]
    lines += [f"| {' | '.join(line(name, found[name], found))} |" for name in names if name in found]
    absent = [f"`{name}`" for name in names if name not in found]
    return "\n".join(lines) + (f"\n\nNot measured: {', '.join(absent)}." if absent else "")


@app.command()
def write(doc: Annotated[Path, typer.Argument()] = DOCUMENT, results: Results = RESULTS) -> None:
    """Put the tables into a document, between their marks."""
    import algorithm_rows

    found, whole = read(results), doc.read_text(encoding="utf-8")
    for begin, made in ((BEGIN, table(found)), (SECOND, algorithm_rows.table(found.get(ALGORITHMS, {})))):
        before, mark, rest = whole.partition(begin)
        if mark:
            whole = f"{before}{begin}\n{made}\n{END}{rest.partition(END)[2]}"
    doc.write_text(whole, encoding="utf-8")


@app.command("all")
def everything(
    model: Path,
    work: Work,
    results: Results = RESULTS,
    device: Device = "cpu",
    document: Annotated[Path, typer.Option(help="Where the table goes, between its marks.")] = DOCUMENT,
) -> None:
    """Cut the text, measure what is missing, and write the document's tables."""
    texts = work / "texts"
    text(texts)
    measure(model, texts, work, results=results, device=device)
    algorithms(model, texts, results)
    write(document, results)


if __name__ == "__main__":
    app()
