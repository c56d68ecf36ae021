"""Installs wheels as users do, each into a fresh virtual environment, and runs products with them.

``python tools/wheel_smoke.py dist/*.whl`` takes the CPython of each wheel's tag from the PATH, pyenv or /opt/python.
A wheel fails if it is larger than `wheels.LIMIT`, does not install or import, or gives a wrong product.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import wheels

# This is run in the fresh environment, which contains only the wheel and its dependencies.
_CHECK = """
import subprocess, sys
from pathlib import Path
import torch
import epiloq
from epiloq import _core

assert Path(epiloq.__file__).is_relative_to(sys.prefix), epiloq.__file__
m, n, k = (int(size) for size in torch.randint(20, 90, (3,)))
a, b = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((m, k), (n, k)))
one = torch.ones(1)
found = epiloq.scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)
assert torch.equal(found.long(), a.long() @ b.long().t()), "int8 product"

q, scale, x = torch.randint(-8, 8, (n, k)), torch.rand(n, -(-k // 32)), torch.randn(m, k)
weight = epiloq.pack_weight(q, scale, bits=4, group_size=32)
wide = scale.repeat_interleave(32, 1)[:, :k].double() * q
error = (epiloq.weight_only_mm(x, weight) - x.double() @ wide.t()).abs()
assert (error <= 1e-5 * (x.double().abs() @ wide.abs().t()) + 1e-6).all(), "4-bit product"

layer = epiloq.quantize_(torch.nn.Sequential(torch.nn.Linear(k, n)), "fp8-token")
assert torch.isfinite(layer(x)).all(), "FP8 layer"

asked = [sys.executable, "-m", "epiloq", "--cmake-dir"]
folder = Path(subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
assert (folder / "epiloqConfig.cmake").is_file(), folder
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, kernels: {_core.built_archs()}, [{m}, {n}, {k}]")
"""


def interpreter_of(wheel: Path) -> Path:
    """Find a CPython of the wheel's version; exits if there is none."""
    tag = re.search(r"-cp3(\d+)-cp3\d+-", wheel.name)
    if tag is None:
        sys.exit(f"{wheel}: expected a wheel of CPython 3, got another name")
    found = next(wheels.interpreters((int(tag[1]),)), None)
    if found is None:
        sys.exit(f"{wheel}: expected CPython 3.{tag[1]} on the PATH, in pyenv or in /opt/python, found none")
    return found


def check(wheel: Path, dependencies: Path | None) -> str:
    """Test a wheel in a fresh environment and return the report. Raises CalledProcessError if it is not usable.

    `dependencies` is a site-packages folder that contains torch and NumPy; pip installs them if it is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([str(interpreter_of(wheel)), "-m", "venv", folder], check=True)
        python = Path(folder, "bin", "python")
        options = [] if dependencies is None else ["--no-deps"]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *options, str(wheel.resolve())], check=True)
        if dependencies is not None:  # added after the installation, or pip would find another epiloq in there
            (own,) = Path(folder).glob("lib/python3.*/site-packages")
            (own / "dependencies.pth").write_text(f"{dependencies.resolve()}\n", encoding="utf-8")
        run = subprocess.run(
            [str(python), "-I", "-c", _CHECK], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
        )
        return run.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument(
        "--dependencies", type=Path, help="a site-packages folder that contains torch, for machines without a network"
    )
    arguments = parser.parse_args()
    for wheel in arguments.wheels:
        size = wheels.checked_size(wheel)
        print(f"{wheel.name}, {size / 1e6:.1f} MB: {check(wheel, arguments.dependencies)}", flush=True)


if __name__ == "__main__":
    main()
