"""Checkpoint formats: tensor layouts of layers, and reading, writing, converting and comparing directories.

Layouts (`awq`, `compressed_tensors`, `gguf`, `gptq`, `marlin`) are pure functions between a `PackedWeight` (or a
calibrated `QuantizedWeight`) and named tensors, see docs/guide/weight_layouts.md. `gguf_model` loads a GGUF file.
`epiloq_modules` and `deepseek_fp8` write models in memory. `table` describes every format for writing, `readers` for
reading. `layers` reads the layers of a directory in any format, and `checkpoint` and `safetensors_file` access files.
``import epiloq`` does not import this package.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    for package in (__name__, f"{__name__}.layouts", f"{__name__}.io"):
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
