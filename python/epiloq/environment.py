"""Describes this installation and this machine. Needs torch alone."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OPTIONAL_PACKAGES = ("transformers", "safetensors", "gguf", "accelerate", "matplotlib", "numpy", "rich", "typer")
PEER_PACKAGES = ("torchao", "vllm", "sgl-kernel", "deep-gemm", "bitsandbytes")
# The instruction sets that decide how fast int8 and bf16 products are on a CPU.
CPU_FEATURES = ("avx2", "avx_vnni", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, None when it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Version of the NVIDIA driver; torch does not know it, so nvidia-smi is asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (subprocess.SubprocessError, OSError):
        return None
    return answer[0] if answer else None


def cpu_facts() -> dict[str, Any]:
    """Architecture, threads, load (mean of the last minute) and the features that matter to quantised products."""
    import torch

    capabilities = _cpu_capabilities()
    return {
        "name": capabilities.get("cpu_name", platform.processor() or platform.machine()),
        "architecture": platform.machine(),
        "logical_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "vector_level": torch.backends.cpu.get_cpu_capability(),
        "features": [name for name in CPU_FEATURES if capabilities.get(name)],
    }


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16 matrices (AMX), much faster than float32's."""
    return bool(_cpu_capabilities().get("amx_bf16"))


def _cpu_capabilities() -> dict[str, Any]:
    """Capabilities by name, empty in torch 2.10, which cannot report them."""
    import torch

    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found


def arithmetic(device: str = "cpu") -> dict[str, str]:
    """Return the facts, by name, that determine the bits of floating-point results on "cpu" or "cuda" (or "cuda:1").

    Processes that compute parts of one result must have the same: a CPU's kernels add in an order that depends on its
    instruction sets and on the number of threads, a GPU's in one that depends on its model.
    """
    import torch

    if device.startswith("cuda"):
        gpu = torch.cuda.get_device_properties(device)
        return {"device": f"{gpu.name} (compute capability {gpu.major}.{gpu.minor})"}
    cpu, limit = cpu_facts(), os.environ.get("ONEDNN_MAX_CPU_ISA")
    sets = [cpu["vector_level"], *cpu["features"], *([] if limit is None else [f"oneDNN up to {limit}"])]
    return {
        "device": f"CPU ({cpu['architecture']})",
        "instruction sets": ", ".join(sets),
        "threads": str(cpu["torch_threads"]),
    }


def gpu_facts() -> list[dict[str, Any]]:
    """Name, compute capability, multiprocessors and memory (bytes) of each visible CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {
            "name": gpu.name,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
        }
        for gpu in found
    ]


def collect() -> dict[str, Any]:
    """The environment as a JSON-ready dictionary. Absent things are None or empty, never missing keys."""
    import torch

    import epiloq
    from epiloq import _core

    return {
        "epiloq": {"version": epiloq.__version__, "kernels": list(_core.built_archs())},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {"version": torch.__version__, "cuda_runtime": torch.version.cuda},
        "driver": driver_version(),
        "gpus": gpu_facts(),
        "cpu": cpu_facts(),
        "packages": {name: installed_version(name) for name in OPTIONAL_PACKAGES + PEER_PACKAGES},
    }


def counted(count: int, noun: str) -> str:
    """A number and its noun: 1 file, 2 files."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The environment as (name, value) lines for a reader."""
    cpu, gpus = facts["cpu"], facts["gpus"]
    gpu_lines = [
        f"{gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['memory_bytes'] / 1e9:.0f} GB"
        for gpu in gpus
    ]
    packages = [f"{name} {found}" for name, found in facts["packages"].items() if found]
    return [
        ("epiloq", facts["epiloq"]["version"]),
        ("kernels", ", ".join(facts["epiloq"]["kernels"]) or "none in this build: every operation runs on the CPU"),
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("torch", f"{facts['torch']['version']} (CUDA runtime {facts['torch']['cuda_runtime'] or 'none'})"),
        ("driver", facts["driver"] or "none"),
        ("gpu", "\n".join(gpu_lines) or "none"),
        (
            "cpu",
            f"{cpu['name']}, {counted(cpu['torch_threads'], 'thread')}, {cpu['vector_level']}, "
            f"load {cpu['load_average']:.1f}",
        ),
        ("cpu features", ", ".join(cpu["features"]) or "none known"),
        ("packages", ", ".join(packages)),
    ]


def print_plainly() -> None:
    """Print the environment without typer and rich: what ``epiloq env`` does where they are missing."""
    for name, value in rows(collect()):
        print(f"{name:<14}{value}")
