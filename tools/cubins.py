"""Inspects the machine code of a library by NVIDIA's cuobjdump and nvdisasm."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

# Small wheels without dependencies that contain the programs.
PACKAGES = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")

_ARCH = re.compile(r"\.(?P<arch>sm_\w+)\.cubin$")
_PRODUCT = re.compile(r"\b[A-Z]G?MMA\b")
_TEXT = re.compile(r"\.text\.(?P<symbol>\w+)\s+PROGBITS\s+\w+\s+(?P<offset>[0-9a-f]+)\s+(?P<size>[0-9a-f]+)")


def program(name: str) -> Path | None:
    """Find one of NVIDIA's programs on the PATH or in this interpreter's site-packages; None if absent."""
    if found := shutil.which(name):
        return Path(found)
    inside = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob(f"*/bin/{name}"))
    return inside[0] if inside else None


def extract(library: Path, folder: Path) -> list[Path]:
    """Extract the cubins of a library to an empty folder. Raises FileNotFoundError without cuobjdump."""
    cuobjdump = program("cuobjdump")
    if cuobjdump is None:
        raise FileNotFoundError(f"cuobjdump is not installed: pip install --no-deps {' '.join(PACKAGES)}")
    subprocess.run([cuobjdump, "-xelf", "all", library], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return sorted(folder.glob("*.cubin"))


def arch(cubin: Path) -> str:
    """Architecture in a cubin's file name, as cuobjdump writes it."""
    found = _ARCH.search(cubin.name)
    if found is None:
        raise ValueError(f"cubins.arch: cubin: expected a name that ends in .sm_*.cubin, got {cubin.name}")
    return found["arch"]


def code(cubin: Path) -> dict[str, bytes]:
    """Machine code of each kernel by symbol."""
    # readelf warns about NVIDIA's private fields.
    command, quiet = ["readelf", "-SW", str(cubin)], subprocess.DEVNULL
    listing = subprocess.run(command, stdout=subprocess.PIPE, stderr=quiet, text=True, check=True).stdout
    content = cubin.read_bytes()
    # Columns: type, address, offset, size.
    spans = {found["symbol"]: (int(found["offset"], 16), int(found["size"], 16)) for found in _TEXT.finditer(listing)}
    return {symbol: content[offset : offset + size] for symbol, (offset, size) in spans.items()}


def code_sizes(cubin: Path) -> dict[str, int]:
    """Size in bytes of each kernel's machine code by symbol."""
    return {symbol: len(instructions) for symbol, instructions in code(cubin).items()}


def products(cubin: Path) -> set[str]:
    """Tensor-core instructions in the code: HMMA, IMMA, HGMMA, ... Raises FileNotFoundError without nvdisasm."""
    nvdisasm = program("nvdisasm")
    if nvdisasm is None:
        raise FileNotFoundError(f"nvdisasm is not installed: pip install --no-deps {' '.join(PACKAGES)}")
    listing = subprocess.run([nvdisasm, cubin], stdout=subprocess.PIPE, text=True, check=True).stdout
    return set(_PRODUCT.findall(listing))
