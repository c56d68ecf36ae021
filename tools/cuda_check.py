"""make cuda-check: compiles every kernel into a wheel and checks the compiler's resource report and the wheel.

It fails for local memory (stack or spills), serialised wgmma (C7510 to C7514, C7518), ignored setmaxnreg (C7508), a
missing architecture, SM90 code without its tensor-core instruction, exported symbols that are not part of the public
API, and a wheel over 30 MB. It prints a table of all kernels and writes it to build/cuda-check/kernels.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import cubins
import exports
import ptxas
import wheels

FOLDER = wheels.ROOT / "build" / "cuda-check"
ARCHS = {"sm75": "sm_75", "sm80": "sm_80", "sm89": "sm_89", "sm90": "sm_90a"}
ENVIRONMENT = {"EPILOQ_CUDA": "ON", "EPILOQ_ARCHS": "75;80;89;90", "EPILOQ_OLD_ON_NEW": "OFF"}
MMA_KERNELS = ("decode_kernel", "gemv_kernel")  # use mma.sync on SM90 too, which is faster for the smallest M


def build(log: Path) -> Path:
    """Build the wheel from scratch, so that the log covers every kernel; ccache repeats ptxas's messages."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    python, environment = Path(sys.executable), os.environ | ENVIRONMENT
    wheels.install_tools(python, environment)
    with log.open("w", encoding="utf-8") as file:
        return wheels.build(python, FOLDER, FOLDER / "build", environment, file)


def install_programs() -> None:
    """Install cuobjdump and nvdisasm if absent; without a network the checks that need them are skipped."""
    if cubins.program("cuobjdump") is None or cubins.program("nvdisasm") is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", *cubins.PACKAGES], check=False)


def lacks_product(symbols: Iterable[str], products: set[str]) -> str | None:
    """Name the tensor-core instruction that these SM90 kernels require but their machine code lacks, else None."""
    is_mma = all(any(name in symbol for name in MMA_KERNELS) for symbol in symbols)
    ending = "MMA" if is_mma else "GMMA"
    if any(product[1:] == ending for product in products):
        return None
    return "mma.sync" if is_mma else "wgmma"


def check_machine_code(library: Path, kernels: Iterable[ptxas.Kernel]) -> list[str]:
    """Fill in code sizes; report architectures without code and SM90 code without its tensor-core instruction."""
    folder = FOLDER / "cubins"
    folder.mkdir(exist_ok=True)
    found = cubins.extract(library, folder)
    sizes = {cubin: cubins.code_sizes(cubin) for cubin in found}
    by_arch = {(cubins.arch(cubin), symbol): size for cubin in found for symbol, size in sizes[cubin].items()}
    for kernel in kernels:
        kernel.code = by_arch.get((kernel.arch, kernel.symbol))
    present = {cubins.arch(cubin) for cubin in found}
    faults = [f"{library.name}: no machine code for {arch}" for arch in ARCHS.values() if arch not in present]
    for cubin in found:
        if cubins.arch(cubin) != ARCHS["sm90"]:
            continue
        if lacking := lacks_product(sizes[cubin], cubins.products(cubin)):
            faults.append(f"{cubin.name}: no {lacking} instruction in {', '.join(sizes[cubin])}")
    return faults


def check_wheel(wheel: Path, folder: Path) -> list[str]:
    """Check size, exported symbols and architectures of a wheel, which is unpacked into ``folder``."""
    faults = []
    size = wheel.stat().st_size
    if size > wheels.LIMIT:
        faults.append(f"{wheel.name}: {size / 1e6:.1f} MB, more than {wheels.LIMIT / 1e6:.0f} MB")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for library in sorted(folder.rglob("*.so")):
        faults += [f"{library.name}: exports {name}" for name in exports.stray(library)]
    ask = [sys.executable, "-c", "from epiloq import _core; print(*_core.built_archs())"]
    answer = subprocess.run(
        ask, env=os.environ | {"PYTHONPATH": str(folder)}, stdout=subprocess.PIPE, text=True, check=True
    )
    if answer.stdout.split() != list(ARCHS):
        faults.append(f"{wheel.name}: built for {answer.stdout.strip() or 'nothing'}, expected {' '.join(ARCHS)}")
    return faults


def table(kernels: Iterable[ptxas.Kernel]) -> str:
    """Format a line per kernel and architecture. Shared memory is the static part; CUTLASS adds more at run time."""
    lines = [["source", "kernel", "arch", "registers", "shared", "stack", "spills", "code"]]
    for kernel in kernels:
        counts = (kernel.registers, kernel.shared, kernel.stack, kernel.spills)
        code = "-" if kernel.code is None else str(kernel.code)
        lines.append([kernel.source, kernel.name, kernel.arch, *map(str, counts), code])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [f"{{:{'<' if index < 3 else '>'}{width}}}" for index, width in enumerate(widths)]
    return "\n".join("  ".join(aligned).format(*line).rstrip() for line in lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    start = time.monotonic()
    log = FOLDER / "build.log"
    wheel = build(log)
    seconds = time.monotonic() - start
    kernels, warnings = ptxas.parse(log.read_text(encoding="utf-8").splitlines())
    faults = [*warnings, *ptxas.faults(kernels)]
    compiled = {kernel.arch for kernel in kernels}
    faults += [f"{log.name}: ptxas compiled nothing for {arch}" for arch in ARCHS.values() if arch not in compiled]
    unpacked = FOLDER / "wheel"
    faults += check_wheel(wheel, unpacked)
    install_programs()
    try:
        faults += check_machine_code(unpacked / "epiloq" / "lib" / "libepiloq.so", kernels)
    except FileNotFoundError as error:
        print(f"note: machine code was not checked: {error}")
    (FOLDER / "kernels.json").write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1) + "\n")
    print(table(kernels))
    print(f"{len(kernels)} kernels, {wheel.name} {wheel.stat().st_size / 1e6:.1f} MB, built in {seconds:.0f} s")
    if faults:
        sys.exit("\n".join(["cuda-check failed:", *faults]))
    print("cuda-check passed")


if __name__ == "__main__":
    main()
