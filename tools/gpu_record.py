"""Records of test and benchmark runs on a GPU.

gpu_record.py --collect OUT   on the GPU machine, called by tools/gpu_verify.sh: write OUT/record.json from the results
gpu_record.py FILE            in the checkout: add that record to docs/verification.json, which keeps the latest record
                              of each card
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEDGER = ROOT / "docs" / "verification.json"
RUNS = ("gpu", "alone", "cpu")  # test runs of gpu_verify.sh
REQUIRED = ("date", "gpu", "driver", "torch", "commit", "kernel_sources", "tests", "benchmark")


def count_tests(junit: Path) -> dict[str, Any]:
    """Read the counts and the names of failed tests from the JUnit file of a pytest run."""
    if junit.stat().st_size == 0:
        return {"passed": 0, "failed": 0, "errors": 1, "skipped": 0, "failures": ["pytest did not finish"]}
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"gpu_record: {junit.name}: expected a <testsuite>, got none")
    total, failures, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    counts = {"passed": total - failures - errors - skipped, "failed": failures, "errors": errors, "skipped": skipped}
    return counts | {"failures": names}


def started_tests(out: Path) -> dict[str, Any]:
    """Count the tests of all runs that were started; gpu_verify.sh creates a file for each, which pytest fills."""
    found = {name: out / f"tests-{name}.xml" for name in RUNS}
    return {name: count_tests(junit) for name, junit in found.items() if junit.exists()}


def benchmark(report: Path) -> dict[str, Any]:
    """Reduce a benchmark report to the command, the numbers of rows and failures, and the geometric means."""
    if not report.exists():
        return {"rows": 0}
    found = json.loads(report.read_text(encoding="utf-8"))
    wrong = sum(row["status"] == "FAILED" for row in found["rows"])
    command = found["environment"]["command"]
    return {"command": command, "rows": len(found["rows"]), "failed": wrong, "summary": found["summary"]}


def collect(out: Path) -> dict[str, Any]:
    """Make a record from the results of gpu_verify.sh in ``out``, on the machine where it ran."""
    import torch

    import epiloq
    from epiloq import _core
    from epiloq.bench.environment import describe

    bundle = json.loads((ROOT / "bundle.json").read_text(encoding="utf-8"))
    facts = describe(torch.device("cuda", 0), bundle["commit"])
    state = facts["state"]
    kept = {key: facts[key] for key in ("date", "gpu", "compute_capability", "torch", "cuda", "python", "commit")}
    return kept | {
        "driver": state.get("driver_version", "") if isinstance(state, dict) else "",
        "epiloq": epiloq.__version__,
        "kernels": list(_core.built_archs()),
        "kernel_sources": bundle["kernel_sources"],
        "tests": started_tests(out),
        "benchmark": benchmark(out / "benchmark.json"),
    }


def append(record: dict[str, Any], ledger: Path = LEDGER) -> None:
    """Replace its card's record in the ledger. Raises ValueError if a field is missing or the record is not newer."""
    missing = [key for key in REQUIRED if key not in record]
    if missing:
        raise ValueError(f"gpu_record: record: expected {', '.join(REQUIRED)}; {', '.join(missing)} missing")
    known = json.loads(ledger.read_text(encoding="utf-8"))
    others = [one for one in known["records"] if one["gpu"] != record["gpu"]]
    for last in known["records"]:
        if last not in others and last["date"] >= record["date"]:
            raise ValueError(f"gpu_record: record: the ledger already has {last['gpu']}'s run of {last['date']}")
    known["records"] = [*others, record]
    known["records"].sort(key=lambda one: one["date"])
    ledger.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="OUT with --collect, else FILE")
    parser.add_argument("--collect", action="store_true", help="write OUT/record.json")
    arguments = parser.parse_args()
    if arguments.collect:
        written = arguments.path / "record.json"
        written.write_text(json.dumps(collect(arguments.path), indent=1) + "\n", encoding="utf-8")
        print(written)
        return
    try:
        append(json.loads(arguments.path.read_text(encoding="utf-8")))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
