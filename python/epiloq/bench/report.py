"""Results of a run as JSON and as plain text."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from epiloq.bench.floor import Ceiling, ReadFloor
from epiloq.bench.runner import HostTime, Row
from epiloq.bench.summary import Summary, summarise
from epiloq.cli.output import STDOUT
from epiloq.files import write_text

SCHEMA = 1
KERNEL_WIDTH = 40


@dataclass
class Report:
    """All results of one run."""

    environment: Mapping[str, object]
    floor: ReadFloor
    ceilings: Mapping[str, Ceiling]
    rows: list[Row] = field(default_factory=list)
    host: list[HostTime] = field(default_factory=list)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.status == "FAILED"]

    def absent_peers(self) -> dict[str, str]:
        """Peers that were never timed, with their reasons."""
        notes: dict[str, dict[str, None]] = {}
        timed = set()
        for row in self.rows:
            for name, peer in row.peers.items():
                label = f"{row.operation}: {name}"
                notes.setdefault(label, {})[peer.note] = None
                if peer.time_us is not None:
                    timed.add(label)
        return {label: "; ".join(reasons) for label, reasons in notes.items() if label not in timed}

    def as_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            **asdict(self),
            "summary": [asdict(s) for s in summarise(self.rows)],
            "absent_peers": self.absent_peers(),
        }

    def write(self, path: Path) -> None:
        """Write JSON to standard output for ``-``, else to a file, replaced atomically in case the run is aborted."""
        text = json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
        if path == STDOUT:
            sys.stdout.write(text)
        else:
            write_text(path, text)


def _number(value: float | None) -> str:
    """Format with at least three significant digits and without an exponent."""
    return "-" if value is None else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    template = "  ".join(f"{{:>{width}}}" for width in widths)
    return "\n".join(template.format(*line).rstrip() for line in lines)


def _rows_table(rows: Sequence[Row]) -> str:
    peers = list(dict.fromkeys(name for row in rows for name, peer in row.peers.items() if peer.ratio is not None))
    head = ["layer", "M", "N", "K", "variant", "arch", "us", "TOPS", "GB/s", "floor %", "by"]
    lines = [head + [f"x {name}" for name in peers] + ["host us", "kernel"]]
    for row in rows:
        line = [row.layer or "-", str(row.m), str(row.n or "-"), str(row.k), row.variant, row.arch]
        line += [_number(row.time_us), _number(row.tops), _number(row.gb_s), _number(row.percent_of_floor)]
        line += [row.bound + ("" if row.cold else " (warm)")]
        line += [_number(row.peers[name].ratio if name in row.peers else None) for name in peers]
        line += [
            _number(row.host_us),
            row.kernel[:KERNEL_WIDTH] if row.status == "ok" else f"{row.status}: {row.reason}",
        ]
        lines.append(line)
    return _aligned(lines)


def _summary_table(summaries: Sequence[Summary]) -> str:
    peers = list(dict.fromkeys(name for summary in summaries for name in summary.peers))
    lines = [["variant", "arch", "group", "rows", "floor %", *(f"x {name}" for name in peers)]]
    for summary in summaries:
        line = [summary.variant, summary.arch, summary.group, str(summary.rows), _number(summary.percent_of_floor)]
        lines.append(line + [_number(summary.peers.get(name)) for name in peers])
    return _aligned(lines)


def _host_table(times: Sequence[HostTime]) -> str:
    lines = [["operation", "variant", "contender", "host us"]]
    lines += [[t.operation, t.variant, t.contender, _number(t.us)] for t in times if t.us is not None]
    return _aligned(lines)


def _floor_text(report: Report) -> str:
    floor = report.floor
    lines = [["MB", "us", "TB/s", "reader"]]
    for s in floor.samples:
        lines.append([f"{s.nbytes / 1e6:.1f}", f"{s.us:.2f}", f"{s.nbytes / s.us / 1e6:.2f}", s.reader])
    text = f"read floor: {floor.overhead_us:.2f} us + bytes / {floor.bytes_per_us / 1e6:.3f} TB/s\n{_aligned(lines)}"
    for name, ceiling in report.ceilings.items():
        text += f"\n{name} ceiling: {ceiling.tops:.4g} TOPS ({ceiling.source})"
    return text


def render(report: Report) -> str:
    """The whole report for a terminal."""
    facts = "\n".join(f"{name}: {value}" for name, value in report.environment.items())
    parts = [facts, _floor_text(report)]
    summaries = summarise(report.rows)
    for operation in dict.fromkeys(row.operation for row in report.rows):
        rows = [row for row in report.rows if row.operation == operation]
        parts.append(f"{operation} (x NAME: time of NAME / time of epiloq)\n{_rows_table(rows)}")
        parts.append(
            f"{operation}, geometric means\n{_summary_table([s for s in summaries if s.operation == operation])}"
        )
    parts.append(f"host time of a call, M = 1, N = 64, K = 128\n{_host_table(report.host)}")
    absent = report.absent_peers()
    if absent:
        parts.append("peers not timed\n" + "\n".join(f"{label}: {reason}" for label, reason in absent.items()))
    return "\n\n".join(parts)
