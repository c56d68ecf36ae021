"""Rows of scheme_table.py and their formatting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

FLOAT = "floating point"
# SmolLM2's 576 channels are not a multiple of 128, which only this format can represent.
SHORT_GROUPS = ("--format", "gptq")
TUNED, SHORTLY_TUNED, ROTATED = ("--tune", "64"), ("--tune", "40"), ("--rotate",)
ALGORITHMS, BUDGET = "algorithms", "budget"
NO_ROWS = ("speed", "about", ALGORITHMS, BUDGET)
"""Keys of the results file that are not rows."""


class Row(NamedTuple):
    """A scheme and an algorithm."""

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
    *(Row("w4a16", algorithm, options) for algorithm in ("rtn", "gptq") for options in ((), ROTATED)),
    Row("w8a8-int8", "smoothquant"),
    Row("w8a8-int8-static", "smoothquant", ("--keep-dynamic", "auto")),
    Row("w4a16-g64", "gptq"),
    Row("w4a16-g64", "awq+gptq"),
    Row("w4a16-g64", "awq"),
    Row("w4a16-g64", "gptq", SHORTLY_TUNED),
    Row("w4a16-g64", "gptq", TUNED),
    *(Row("w4a16-g64", algorithm) for algorithm in ("gptq+refine", "gptq-guided", "awq+gptq-guided")),
    Row("w8a8-int8-static", "smoothquant-search"),
    Row("w8a8-int8-static", "smoothquant-search", TUNED),
    *(Row("w8a8-int8-static", f"smoothquant{more}+gptq") for more in ("", "-search")),
    Row("w8a8-int8", "smoothquant", TUNED),
    Row("w4a16-g32", "gptq"),
    Row("w4a16-g32", "awq+gptq"),
    Row("w4a16-g32", "awq"),
    Row("w8a8-int8-static", "smoothquant"),
    Row("w8a8-int8-static", "smoothquant-search", ("--keep-dynamic", "auto")),
    *(Row("w8a8-int8", f"smoothquant{more}") for more in ("-search", "+gptq", "-search+gptq")),
    Row("w8a8-int8-azp", "smoothquant"),
    Row("w4a16-g128", "gptq", SHORT_GROUPS),
    Row("w4a16-g128", "awq+gptq", SHORT_GROUPS),
    *(Row("fp8-block", algorithm) for algorithm in ("rtn", "gptq")),
    *(Row(scheme, algorithm) for scheme in ("w4a8-block-g32", "w4a8-block") for algorithm in ("rtn", "gptq")),
    *(Row(scheme, "rtn") for scheme in ("fp8-token", "fp8", "w8a8-block", "w8a16-fp8", "w8a16-fp8-block")),
    *(Row(scheme, algorithm) for scheme in ("w4a16-mxfp4", "w4a16-nvfp4") for algorithm in ("rtn", "gptq")),
    # Only the epiloq format has these short groups.
    *(Row("w4a8-fp8", algorithm) for algorithm in ("rtn", "gptq")),
)
SUMMARY = (
    Row("w8a16", "rtn"),
    *(Row(f"fp8{kind}", "rtn") for kind in ("-token", "-block")),
    *(Row("w8a8-int8", algorithm) for algorithm in ("rtn", "smoothquant", "smoothquant-search+gptq")),
    Row("w8a8-int8-azp", "rtn"),
    Row("w8a8-int8-static", "smoothquant-search+gptq"),
    Row("w8a8-int8-static", "smoothquant-search", TUNED),
    *(Row("w4a16-g32", algorithm) for algorithm in ("rtn", "awq+gptq")),
    *(Row("w4a16-g64", algorithm) for algorithm in ("rtn", "gptq", "awq+gptq", "gptq-guided")),
    Row("w4a16-g64", "awq+gptq", TUNED),
    *(Row("w4a16-g128", algorithm, SHORT_GROUPS) for algorithm in ("rtn", "gptq")),
    *(Row(f"w4a16-{form}", "gptq") for form in ("mxfp4", "nvfp4")),
    Row("w4a16", "rtn"),
    *(Row("w4a16", "gptq", options) for options in ((), ROTATED, (*ROTATED, *TUNED))),
    *(Row("w4a8-fp8", algorithm) for algorithm in ("rtn", "gptq")),
    *(Row("w4a8-block", algorithm) for algorithm in ("rtn", "gptq")),
)
TEACHER_ROWS = (
    *(Row(scheme, "rtn") for scheme in ("w4a16-g32", "w4a8-block-g32", "w8a8-int8", "fp8-token")),
    Row("w4a8-block-g32", "gptq"),
    Row("w8a8-int8", "smoothquant-search"),
    Row("w8a8-int8-static", "smoothquant-search"),
    Row("w8a8-int8-static", "smoothquant-search", TUNED),
)


def nats(kl: float) -> str:
    """Format a divergence, with more digits if it is small."""
    return f"{kl:.4f}" if kl >= 0.002 else f"{kl:.6f}"


def line(name: str, row: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the cells of a row."""
    exact = found[FLOAT]["perplexity"]
    cells = [f"{row['perplexity']:.2f}", f"{100 * (row['perplexity'] / exact - 1):+.1f} %"]
    cells.append(nats(row["kl"]) if "kl" in row and name != FLOAT else "")
    nearest = next((r for n, r in found.items() if n.startswith(f"{row.get('scheme')} rtn")), None)
    gap = nearest["perplexity"] - exact if nearest else 0.0
    closed = gap > 0.01 * exact and nearest is not row and row["scheme"].startswith("w4")
    cells.append(f"{100 * (1 - (row['perplexity'] - exact) / gap):.0f} %" if closed else "")
    cells.append(f"{row['bytes'] / 1e6:.0f}" if "bytes" in row else "")
    took = found.get("speed", {}).get(row.get("scheme"))
    cells += ["", ""] if took is None else [f"{took[0]:.2f}x", f"{took[1]:.2f}x"]
    kept = f" ({row['dynamic']} of {row['layers']} layers)" if row.get("dynamic") else ""
    return [f"`{name}`{kept}" if name != FLOAT else name, *cells]


def table(found: dict[str, Any], rows: Sequence[Row] = ROWS) -> str:
    """Format the table in Markdown, followed by the rows that were not measured."""
    heads = ("scheme, algorithm", "perplexity", "change", "KL", "gap closed", "MB", "prefill", "decode")
    lines = [f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|"]
    known = {row.name for row in rows} | {name for name in found if name not in (FLOAT, *NO_ROWS)}
    names = [FLOAT, *sorted(known, key=lambda name: (name.split()[0], len(name), name))]
    lines += [f"| {' | '.join(line(name, found[name], found))} |" for name in names if name in found]
    absent = [f"`{name}`" for name in names if name not in found]
    return "\n".join(lines) + (f"\n\nNot measured: {', '.join(absent)}." if absent else "")


def summary(found: dict[str, Any]) -> str:
    """Format the table of the rows between which most users choose."""
    rows = {FLOAT, *NO_ROWS, *(row.name for row in SUMMARY)}
    return table({name: row for name, row in found.items() if name in rows}, SUMMARY)
