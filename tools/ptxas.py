"""Parses the output of ptxas -v and ninja: each kernel's registers, shared memory, stack and spills."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

# ptxas warnings that mean slow code: wgmma serialised (six known causes), setmaxnreg ignored (C7508).
PERFORMANCE_WARNINGS = re.compile(r"\bC75(08|10|11|12|13|14|18)\b")

_SOURCE = re.compile(
    r"^\s*\[\d+/\d+\] Building CUDA object \S*?(?:epiloq_)?(?P<target>\w+)\.dir/(?P<name>[^/]+)\.cu\.o"
)
_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for '(?P<arch>\w+)'")
_MEMORY = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")
_SHARED = re.compile(r"(?P<bytes>\d+) bytes smem")

_CUTLASS_3X = re.compile(
    r"MainloopSm\d+TmaGmma\w+<(\d+), cute::tuple<cute::C<(\d+)>, cute::C<(\d+)>, .*?KernelTmaWarpSpecialized(\w*)>, "
    r"cute::tuple<cute::C<(\d+)>, cute::C<(\d+)>, cute::C<(\d+)> >"
)
_CUTLASS_2X = re.compile(r"Kernel2<.*?GemmShape<(\d+), (\d+), (\d+)>, cutlass::gemm::GemmShape<(\d+), (\d+), (\d+)>")


@dataclass
class Kernel:
    """ptxas's report of a kernel for one architecture. Sizes are in bytes; shared memory is the static part."""

    symbol: str
    arch: str
    source: str
    name: str = ""
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spills: int = 0
    code: int | None = None

    @property
    def label(self) -> str:
        return f"{self.source}: {self.name} ({self.arch})"


def parse(lines: Iterable[str]) -> tuple[list[Kernel], list[str]]:
    """Return the kernels of a build log, in its order, and its warnings about slow code.

    Stack and spills of functions that a kernel calls, reported after it, are added to the kernel's.
    """
    kernels: dict[tuple[str, str, str], Kernel] = {}
    warnings: dict[str, None] = {}
    source, current = "", Kernel("", "", "")
    for line in lines:
        if built := _SOURCE.search(line):
            source = f"{built['target']}/{built['name']}"
        elif entry := _ENTRY.search(line):
            current = Kernel(entry["symbol"], entry["arch"], source)
            kernels[source, current.symbol, current.arch] = current
        elif memory := _MEMORY.search(line):
            current.stack = max(current.stack, int(memory["stack"]))
            current.spills = max(current.spills, int(memory["stores"]) + int(memory["loads"]))
        elif used := _REGISTERS.search(line):
            current.registers = int(used["registers"])
            shared = _SHARED.search(line)
            current.shared = int(shared["bytes"]) if shared else 0
        if PERFORMANCE_WARNINGS.search(line):
            warnings[line.strip()] = None
    found = list(kernels.values())
    for kernel, demangled in zip(found, demangle([kernel.symbol for kernel in found]), strict=True):
        kernel.name = short_name(demangled)
    return found, list(warnings)


def demangle(symbols: list[str]) -> list[str]:
    """Demangle C++ names; CUTLASS's exceed the default recursion limit of c++filt."""
    command, pipe = ["c++filt", "--no-recurse-limit"], subprocess.PIPE
    answer = subprocess.run(command, input="\n".join(symbols), stdout=pipe, text=True, check=True)
    return answer.stdout.splitlines()


def short_name(demangled: str) -> str:
    """Short name of a kernel that is unique in its source: the tile of a CUTLASS kernel, else the function's name."""
    if found := _CUTLASS_3X.search(demangled):
        stages, cluster_m, cluster_n, schedule, *tile = found.groups()
        return f"{'x'.join(tile)} cluster {cluster_m}x{cluster_n} {stages} stages {schedule.lower()}".rstrip()
    if found := _CUTLASS_2X.search(demangled):
        return f"{'x'.join(found.groups()[:3])} warp {'x'.join(found.groups()[3:])}"
    plain = demangled.replace("(anonymous namespace)::", "").split("(")[0].removeprefix("void ")
    return re.sub(r"\b\w+::", "", plain)


def faults(kernels: Iterable[Kernel]) -> list[str]:
    """Return a line for each kernel that uses local memory."""
    return [
        f"{kernel.label}: {kernel.stack} bytes of stack, {kernel.spills} bytes of spills"
        for kernel in kernels
        if kernel.stack or kernel.spills
    ]
