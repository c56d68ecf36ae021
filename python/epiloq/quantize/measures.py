"""The machine and file sizes, for a run's report."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch

import epiloq
from epiloq.environment import counted


def environment(device: str) -> dict[str, str]:
    """Versions and the machine, as text."""
    processor: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor.get("cpu_name", "")
    return {
        "versions": f"epiloq {epiloq.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "machine": f"{where or platform.machine()}, {counted(torch.get_num_threads(), 'thread')}",
    }


def peak_memory() -> int:
    """Peak memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def weight_bytes(folder: Path) -> int:
    """The size of a directory's weight files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
