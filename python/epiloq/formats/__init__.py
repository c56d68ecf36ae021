"""Checkpoint formats: layouts of one layer's tensors, and directories of them, read, written, converted and compared.

Layouts (`awq`, `compressed_tensors`, `gguf`, `gptq`, `marlin`) are pure functions between a `PackedWeight` (or a
calibrated `QuantizedWeight`) and tensors by name, see docs/guide/weight_layouts.md; `gguf_model` runs a file's;
`epiloq_modules` and `deepseek_fp8` write models in memory; `table` has every format as data, `readers` the way back;
`layers` reads the layers of a directory in any of them; `checkpoint` and `safetensors_file` hold files. Nothing here is
imported by ``import epiloq``.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    for package in (__name__, f"{__name__}.layouts", f"{__name__}.io"):
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
