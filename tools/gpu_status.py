"""make gpu-status: prints the last run on a GPU, whether the kernels changed since, and which runs are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kernel_sources

LEDGER = kernel_sources.ROOT / "docs" / "verification.json"


def describe(record: dict[str, Any]) -> list[str]:
    """Format a record in a few lines."""
    lines = [f"{record['date']}: {record['gpu']}, driver {record['driver']}, torch {record['torch']}"]
    lines.append(f"  commit {record['commit'] or 'unknown'}, kernel sources {record['kernel_sources'][:12]}")
    for name, counts in record["tests"].items():
        lines.append(f"  {name} tests: " + ", ".join(f"{counts[key]} {key}" for key in counts if key != "failures"))
    benchmark = record["benchmark"]
    lines.append(f"  benchmark: {benchmark['rows']} rows, {benchmark.get('failed', 0)} of them wrong")
    return lines


def is_clean(record: dict[str, Any]) -> bool:
    """Whether a run had tests, also on the GPU, and no failure in tests or benchmarked results."""
    runs = record["tests"].values()
    failed = any(counts["failed"] or counts["errors"] or not counts["passed"] for counts in runs)
    return not failed and not record["benchmark"].get("failed") and "gpu" in record["tests"]


def status(ledger: dict[str, Any], digest: str) -> list[str]:
    """Describe the newest record, and the runs that are missing for kernel sources with this digest."""
    lines, missing = [], []
    if not ledger["records"]:
        lines.append("no run on a GPU is recorded")
        missing.append("a run of the GPU tests: make gpu-bundle, then tools/gpu_verify.sh on a GPU machine")
    else:
        newest = max(ledger["records"], key=lambda record: str(record["date"]))
        lines += describe(newest)
        if newest["kernel_sources"] != digest:
            missing.append(f"a new run: the kernel sources changed since ({digest[:12]} now)")
        if not is_clean(newest):
            missing.append("a run without failures")
    missing += [f"never run: {entry['kernels']}; needs {entry['needs']}" for entry in ledger["never_run"]]
    return [*lines, "missing:" if missing else "nothing is missing", *(f"  {run}" for run in missing)]


def main(ledger: Path = LEDGER) -> None:
    print("\n".join(status(json.loads(ledger.read_text(encoding="utf-8")), kernel_sources.digest())))


if __name__ == "__main__":
    main()
