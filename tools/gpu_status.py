"""make gpu-status: what ran on a GPU, whether the kernels changed since, and what is owed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kernel_sources

LEDGER = kernel_sources.ROOT / "docs" / "verification.json"


def describe(record: dict[str, Any]) -> list[str]:
    """A record in a few lines."""
    lines = [f"{record['date']}: {record['gpu']}, driver {record['driver']}, torch {record['torch']}"]
    lines.append(f"  commit {record['commit'] or 'unknown'}, kernel sources {record['kernel_sources'][:12]}")
    for name, counts in record["tests"].items():
        lines.append(f"  {name} tests: " + ", ".join(f"{counts[key]} {key}" for key in counts if key != "failures"))
    benchmark = record["benchmark"]
    lines.append(f"  benchmark: {benchmark['rows']} rows, {benchmark.get('failed', 0)} of them wrong")
    return lines


def is_clean(record: dict[str, Any]) -> bool:
    """Whether nothing failed in a run: no test, no benchmarked result, and tests did run, on the GPU too."""
    runs = record["tests"].values()
    failed = any(counts["failed"] or counts["errors"] or not counts["passed"] for counts in runs)
    return not failed and not record["benchmark"].get("failed") and "gpu" in record["tests"]


def status(ledger: dict[str, Any], digest: str) -> list[str]:
    """The newest record, then what is owed for kernel sources of this digest."""
    lines, owed = [], []
    if not ledger["records"]:
        lines.append("no run on a GPU is recorded")
        owed.append("a run of the GPU tests: make gpu-bundle, then tools/gpu_verify.sh on a GPU machine")
    else:
        newest = max(ledger["records"], key=lambda record: str(record["date"]))
        lines += describe(newest)
        if newest["kernel_sources"] != digest:
            owed.append(f"a new run: the kernel sources changed since ({digest[:12]} now)")
        if not is_clean(newest):
            owed.append("a run without failures")
    owed += [f"never run: {entry['kernels']}; needs {entry['needs']}" for entry in ledger["never_run"]]
    return [*lines, "owed:" if owed else "nothing is owed", *(f"  {debt}" for debt in owed)]


def main(ledger: Path = LEDGER) -> None:
    print("\n".join(status(json.loads(ledger.read_text(encoding="utf-8")), kernel_sources.digest())))


if __name__ == "__main__":
    main()
