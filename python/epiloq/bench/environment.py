"""Environment recorded with each result: the machine, the versions, the commit and the command."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

import epiloq

GPU_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit")


def _output(command: Sequence[str]) -> str:
    """Standard output of a program; empty if it is not installed or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def gpu_state(device: torch.device) -> dict[str, str]:
    """Driver, clocks (MHz) and power (W) that nvidia-smi reports now; empty without nvidia-smi."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    values = _output(query).split(", ")
    return dict(zip(GPU_FIELDS, values, strict=True)) if len(values) == len(GPU_FIELDS) else {}


def commit() -> str:
    """Commit of the checkout that contains this package, marked if it has local changes; empty outside a checkout."""
    folder = str(Path(__file__).parent)
    return _output(["git", "-C", folder, "describe", "--match=", "--always", "--dirty", "--abbrev=40"])


def command(arguments: Sequence[str]) -> str:
    """The command line, with paths shortened to file names, because results are read on other machines."""
    options = arguments[1:] if arguments[:1] == ["bench"] else arguments
    return " ".join(["epiloq bench", *(re.sub(r"(^|=)/.*/", r"\1", option) for option in options)])


def describe(device: torch.device, known_commit: str = "") -> dict[str, object]:
    """JSON-ready facts about the machine and the software. ``known_commit`` is used outside a checkout."""
    facts: dict[str, object] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.argv[1:]),
        "epiloq": epiloq.__version__,
        "commit": known_commit or commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return facts | {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "state": gpu_state(device),
        }
    return facts | {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "load_average": os.getloadavg()[0],
    }
