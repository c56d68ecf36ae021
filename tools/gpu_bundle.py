"""make gpu-bundle: makes a folder for a GPU machine without a network, where `bash tools/gpu_verify.sh` runs the tests.

It contains a wheel for Python 3.12 whose SM75 and SM80 kernels are also compiled for SM90, so that all of them run on a
Hopper GPU, the wheels that the tests need in addition to torch, the tests, the examples and these tools; with `--peers`
also small peers of the benchmark that work with that machine's torch. It reports faults that `make cuda-check`, which
takes half an hour, would find in the kernels that were compiled again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kernel_sources
import ptxas
import wheels

FOLDER = wheels.ROOT / "build" / "gpu-bundle"
LOG = FOLDER.with_suffix(".log")
PYTHON_MINOR = 12
ENVIRONMENT = {"EPILOQ_CUDA": "ON", "EPILOQ_ARCHS": "75;80;89;90", "EPILOQ_OLD_ON_NEW": "ON"}
TEST_PACKAGES = ("pytest", "pytest-xdist", "hypothesis", "typer", "rich")
PEERS = ("sgl-deep-gemm==0.1.5", "apache-tvm-ffi", "humming-kernels")
LIMIT = 60 * 2**20  # bytes


def commit() -> str:
    """Commit of the checkout, marked if it has local changes; empty outside a checkout."""
    command = ["git", "-C", str(wheels.ROOT), "describe", "--match=", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def fetch(packages: tuple[str, ...], out: Path, *more: str) -> None:
    """Download wheels for Python 3.12 on Linux, with dependencies unless `more` has "--no-deps"."""
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("2014", "_2_17", "_2_24", "_2_28", "_2_34")]
    options = ["--only-binary=:all:", f"--python-version=3.{PYTHON_MINOR}", *platforms, f"--dest={out}", *more]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, *packages], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="the benchmark's peers too")
    options = parser.parse_args()
    python = next(wheels.interpreters((PYTHON_MINOR,)), None)
    if python is None:
        sys.exit(f"gpu-bundle: no CPython 3.{PYTHON_MINOR} was found, on the PATH or in pyenv")
    shutil.rmtree(FOLDER, ignore_errors=True)
    # The digest is taken before the build, so that a change during the build does not count as tested.
    facts = {"kernel_sources": kernel_sources.digest(), "commit": commit()}
    environment = os.environ | ENVIRONMENT
    inside = wheels.build_environment(python, environment)
    with LOG.open("w", encoding="utf-8") as file:
        wheel = wheels.build(inside, FOLDER / "wheels", wheels.ROOT / "build" / "gpu-bundle-build", environment, file)
    kernels, warnings = ptxas.parse(LOG.read_text(encoding="utf-8").splitlines())
    fetch(TEST_PACKAGES, FOLDER / "wheels")  # none of them depends on torch
    if options.peers:
        fetch(PEERS, FOLDER / "wheels", "--no-deps")
    for name in ("tests", "tools", "examples"):
        shutil.copytree(wheels.ROOT / name, FOLDER / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(wheels.ROOT / "pyproject.toml", FOLDER)
    (FOLDER / "bundle.json").write_text(json.dumps(facts | {"wheel": wheel.name}, indent=1) + "\n")
    for fault in [*warnings, *ptxas.faults(kernels)]:
        print(f"note: {fault}")
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    print(f"{FOLDER.relative_to(wheels.ROOT)}: {size / 2**20:.1f} MiB, kernel sources {facts['kernel_sources'][:12]}")
    if size > LIMIT:
        sys.exit(f"gpu-bundle: expected at most {LIMIT / 2**20:.0f} MiB, got {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
