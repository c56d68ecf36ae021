"""Records of GPU runs: written from results, kept once, and searched for missing runs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

gpu_record = pytest.importorskip("gpu_record", reason="the repository's tools are not here")
import gpu_status
import kernel_sources

NEVER_RUN = {"kernels": "machine code of the SM75 kernels", "needs": "a Turing GPU"}


def record(**changes: Any) -> dict[str, Any]:
    counts = {"passed": 3, "failed": 0, "errors": 0, "skipped": 1, "failures": []}
    complete = {
        "date": "2026-01-02T03:04:05+00:00",
        "gpu": "a GPU",
        "driver": "1",
        "torch": "2",
        "commit": "c",
        "kernel_sources": "d" * 64,
        "tests": {"gpu": counts, "cpu": counts},
        "benchmark": {"rows": 7, "failed": 0, "summary": []},
    }
    return complete | changes


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "verification.json"
    path.write_text(json.dumps({"records": [], "never_run": [NEVER_RUN]}))
    return path


SUITE = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError

def test_good(): pass
def test_bad(): assert False
def test_broken(broken): pass
@pytest.mark.skip
def test_skipped(): pass
"""


def test_tests_are_counted_by_outcome(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--junitxml=found.xml", "test_suite.py"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    counts = gpu_record.count_tests(tmp_path / "found.xml")
    failures = counts.pop("failures")
    assert counts == {"passed": 1, "failed": 1, "errors": 1, "skipped": 1}
    assert [name.rpartition("::")[2] for name in failures] == ["test_bad", "test_broken"]


def test_a_run_that_left_no_results_counts_as_an_error(tmp_path: Path) -> None:
    (tmp_path / "tests-alone.xml").touch()
    started = gpu_record.started_tests(tmp_path)
    assert list(started) == ["alone"] and started["alone"]["errors"] == 1
    assert gpu_record.benchmark(tmp_path / "absent.json") == {"rows": 0}


def test_the_latest_record_of_each_card_is_kept(ledger: Path) -> None:
    first, second = record(date="2026-01-01"), record(date="2026-02-01")
    other = record(gpu="another GPU", date="2026-01-15")
    for one in (first, other, second):
        gpu_record.append(one, ledger)
    for known in (second, first):
        with pytest.raises(ValueError, match="already has a GPU's run of 2026-02-01"):
            gpu_record.append(known, ledger)
    with pytest.raises(ValueError, match="driver missing"):
        gpu_record.append({key: value for key, value in record().items() if key != "driver"}, ledger)
    assert json.loads(ledger.read_text()) == {"records": [other, second], "never_run": [NEVER_RUN]}


@pytest.mark.skipif(not gpu_status.LEDGER.exists(), reason="the ledger is in the checkout only")
def test_the_ledger_has_one_record_of_each_card() -> None:
    cards = [one["gpu"] for one in json.loads(gpu_status.LEDGER.read_text())["records"]]
    assert cards and len(set(cards)) == len(cards)


def missing(*records: dict[str, Any], digest: str = "d" * 64, never_run: tuple[dict[str, str], ...] = ()) -> list[str]:
    lines = gpu_status.status({"records": list(records), "never_run": list(never_run)}, digest)
    return lines[lines.index("missing:") + 1 :] if "missing:" in lines else []


def test_status_lists_missing_runs() -> None:
    assert missing(record()) == []
    assert len(missing()) == 1
    assert "sources changed" in missing(record(), digest="e" * 64)[0]
    assert missing(record(), never_run=(NEVER_RUN,)) == [
        "  never run: machine code of the SM75 kernels; needs a Turing GPU"
    ]
    # The newest record counts, wherever it stands.
    assert missing(record(date="2027"), record(kernel_sources="old")) == []


@pytest.mark.parametrize("outcome", [{"failed": 1}, {"errors": 1}, {"passed": 0}])
def test_failed_run_requires_another(outcome: dict[str, int]) -> None:
    tests = record()["tests"]
    assert missing(record(tests=tests | {"gpu": tests["gpu"] | outcome})) == ["  a run without failures"]
    assert missing(record(benchmark={"rows": 7, "failed": 1})) == ["  a run without failures"]


def test_the_digest_sees_every_change_of_a_source(tmp_path: Path, seed: int) -> None:
    for name in ("CMakeLists.txt", "src/a.h", "src/b/c.cu", "include/d.h", "cmake/e.cmake", "third_party/f.cmake"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(random.Random(seed).randbytes(20))
    first = kernel_sources.digest(tmp_path)
    (tmp_path / "README.md").write_text("no source")
    assert kernel_sources.digest(tmp_path) == first
    seen = {first}
    for path in kernel_sources.files(tmp_path):
        before = path.read_bytes()
        path.write_bytes(before + b"x")
        seen.add(kernel_sources.digest(tmp_path))
        path.write_bytes(before)
    (tmp_path / "src/a.h").rename(tmp_path / "src/g.h")
    seen.add(kernel_sources.digest(tmp_path))
    assert len(seen) == 8
