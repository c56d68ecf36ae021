"""``epiloq inspect``: the contents of a model directory, without running the model."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from epiloq.cli.common import check_installed, check_target, failures, json_option, quiet
from epiloq.cli.output import plain_table, results_console, say, write_json
from epiloq.cli.progress import progress_stages
from epiloq.environment import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NAMED = 4


def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model directory, quantised or not, or a GGUF file.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Also decode every layer, and check for NaN and infinities.")
    ] = False,
    json_file: Annotated[Path | None, json_option()] = None,
) -> None:
    """Show how a model directory is quantised, its size, and which formats can represent it.

    Every tensor's header is compared with the model that config.json describes; values are read only with --check.

    Examples:\n
      epiloq inspect model-w4\n
      epiloq inspect model-w4 --check --json facts.json\n
      epiloq inspect model-q4_k_m.gguf\n

    Exit codes: 0 valid; 2 invalid, with one sentence that names the file and the tensor.
    """
    check_target(json_file, inputs=(folder,))
    console = results_console(json_file)
    with failures("inspect"):
        quiet()
        from epiloq.formats.io.checkpoint import Checkpoint
        from epiloq.formats.io.gguf_file import is_gguf
        from epiloq.formats.layers import Layers
        from epiloq.inspection import directory, gguf

        if is_gguf(folder):
            check_installed("inspect", [] if find_spec("gguf") else ["gguf"], "gguf")
            facts = gguf.inspect(folder, check)
            show_gguf(facts, console)
            write_json(json_file, facts)
            return
        layers = Layers(Checkpoint(folder))
        facts = directory.inspect(layers)
        if check:
            with progress_stages() as stage, stage("decode", len(layers.readers) + len(layers.rest)) as advance:
                facts["wrong"] = directory.check(layers, advance)
        show(facts, console)
        write_json(json_file, facts)
        if facts.get("wrong"):
            raise ValueError(next(iter(facts["wrong"].values())))


def show_gguf(facts: dict[str, Any], console: Console) -> None:
    """Print the facts of a GGUF file."""
    lines = [
        f"{facts['model']}: {shortened(facts['architectures'])}, format gguf ({facts['architecture']}), "
        f"{facts['bytes'] / 1e6:.1f} MB in {facts['tensors']} tensors"
    ]
    for row in facts["kinds"]:
        size = f"{row['bits']:g} bits a weight, {row['bytes'] / 1e6:.1f} MB"
        lines.append(f"  {row['kind']}: {row['tensors']} tensors, {size}: {row['runs']}")
    say(console, "\n".join(lines))
    console.print(_gguf_table(facts["layers"]))


def _gguf_table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table()
    for heading, justify in _GGUF_COLUMNS.items():
        table.add_column(heading, justify=justify)
    for row in rows:
        size = (f"{row['bits']:g}", f"{row['bytes'] / 1e6:.1f}")
        table.add_row(row["name"], str(row["tensors"]), "x".join(map(str, row["shape"])), row["kind"], *size)
    return table


def show(facts: dict[str, Any], console: Console) -> None:
    """Print the facts."""
    size = facts["bytes"]
    if facts["format"] is None:
        say(console, f"{facts['model']}: {shortened(facts['architectures'] or [])}, in floating point")
    else:
        version = "" if facts["version"] is None else f" ({facts['version']})"
        say(
            console,
            f"{facts['model']}: {shortened(facts['architectures'] or [])}, scheme {facts['scheme'] or 'of its own'}, "
            f"format {facts['format']}{version}",
        )
        console.print(_table(facts["kinds"]))
    say(
        console,
        f"{size['after'] / 1e6:.1f} MB in {counted(facts['tensors'], 'tensor')} and {counted(facts['files'], 'file')}, "
        f"{size['before'] / 1e6:.1f} MB in floating point ({size['before'] / max(1, size['after']):.2f}x): "
        + ", ".join(f"{dtype} {count / 1e6:.1f}" for dtype, count in size["after_by_dtype"].items()),
    )
    rest = facts["not_quantised"]
    say(
        console,
        f"Not quantised: {rest['bytes'] / 1e6:.1f} MB in {counted(rest['tensors'], 'tensor')} "
        f"({shortened(rest['largest'])}); linear layers: {shortened(rest['linear']) or 'none'}",
    )
    for name, reason in list(rest["experts"].items())[:NAMED]:
        say(console, f"Experts in floating point: {name}: {reason}")
    if len(rest["experts"]) > NAMED:
        say(console, f"Experts in floating point: {len(rest['experts']) - NAMED} more layers")
    for note in facts["notes"]:
        say(console, note)
    for name, reason in facts["formats"].items():
        say(console, f"  {name}: {'can represent it' if reason is None else f'no: {reason}'}")
    for reason in facts.get("wrong", {}).values():
        say(console, f"Wrong: {reason}")


def shortened(names: Iterable[str]) -> str:
    """A few names, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more


def _table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table()
    for heading, justify in _COLUMNS.items():
        table.add_column(heading, justify=justify, overflow="fold" if heading == "inputs" else "ellipsis")
    for row in rows:
        table.add_row(
            row["kind"],
            str(row["layers"]),
            "x".join(map(str, row["shape"])),
            row["weights"],
            str(row["group_size"]),
            "yes" if row["symmetric"] else "no",
            "yes" if row["act_order"] else "no",
            row["activations"] or "float",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['bytes_before'] / 1e6:.1f}",
        )
    return table


_GGUF_COLUMNS: dict[str, Literal["left", "right"]] = {
    "tensors": "left",
    "n": "right",
    "shape": "right",
    "type": "left",
    "bits": "right",
    "MB": "right",
}
_COLUMNS: dict[str, Literal["left", "right"]] = {
    "layers": "left",
    "n": "right",
    "shape": "right",
    "weights": "left",
    "group": "right",
    "sym": "left",
    "act-order": "left",
    "inputs": "left",
    "MB": "right",
    "before": "right",
}
