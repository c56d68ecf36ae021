"""epiloq: quantised matrix multiplication for PyTorch.

The operations (`scaled_mm`, `groupwise_mm`, `online_quant_mm`, `weight_only_mm`, `quantize_int8` and others) take
torch tensors, on a CUDA device or on the CPU. The layers of `nn` and `quantize_` use them in models. `explain`,
`supports` and `config` show and control which kernel runs, and `tune` measures kernels. `quantize` contains the
algorithms, `formats` the checkpoint formats, and `compat` functions with the names of other libraries.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from epiloq import _built_module

if TYPE_CHECKING:
    from epiloq import _core as _core
    from epiloq import compat as compat
    from epiloq import formats as formats
    from epiloq import nn as nn
    from epiloq import quantize as quantize
    from epiloq import schemes as schemes
    from epiloq.generation import decode as decode
    from epiloq.introspect import config as config
    from epiloq.introspect import explain as explain
    from epiloq.introspect import set_batch_invariant as set_batch_invariant
    from epiloq.introspect import supports as supports
    from epiloq.kv_cache import QuantizedCache as QuantizedCache
    from epiloq.optimize import optimize_ as optimize_
    from epiloq.schemes import quantize_ as quantize_
    from epiloq.tuning.tuner import tune as tune

_built_module.load()  # sets _core, or raises ImportError with the reason

# The build environment of a C++ project may lack torch, and needs paths alone (`python -m epiloq --cmake-dir`).
if find_spec("torch") is not None:
    from epiloq.ops import (
        conv2d_int8,
        conv2d_weight_only,
        fp4_mm,
        fp8_weight_mm,
        grouped_mm,
        grouped_packed_mm,
        groupwise_mm,
        lookup_int8,
        online_quant_mm,
        online_quant_weight,
        packed_fp4_mm,
        quantize_blockwise_int8,
        quantize_fp8,
        quantize_int8,
        requantized_mm,
        rms_norm,
        rms_norm_quant,
        scaled_bmm,
        scaled_mm,
        scaled_mm_azp,
        silu_and_mul,
        silu_and_mul_quant,
        table_mm,
        w4a8_mm,
        weight_only_mm,
    )
    from epiloq.weights.block_quant_weight import BlockQuantWeight
    from epiloq.weights.fp4 import fp4_dequantize, fp4_quantize
    from epiloq.weights.packed_conv2d_weight import PackedConv2dWeight, pack_conv2d_weight
    from epiloq.weights.packed_fp4_weight import PackedFp4Weight, pack_fp4_weight
    from epiloq.weights.packed_weight import PackedWeight, pack_weight
    from epiloq.weights.prepared_int8_weight import PreparedInt8Weight

__version__: str = _core.__version__

__all__ = [
    "BlockQuantWeight",
    "PackedConv2dWeight",
    "PackedFp4Weight",
    "PackedWeight",
    "PreparedInt8Weight",
    "__version__",
    "compat",
    "config",
    "conv2d_int8",
    "conv2d_weight_only",
    "decode",
    "explain",
    "formats",
    "fp4_dequantize",
    "fp4_mm",
    "fp4_quantize",
    "fp8_weight_mm",
    "grouped_mm",
    "grouped_packed_mm",
    "groupwise_mm",
    "lookup_int8",
    "nn",
    "online_quant_mm",
    "online_quant_weight",
    "optimize_",
    "pack_conv2d_weight",
    "pack_fp4_weight",
    "pack_weight",
    "packed_fp4_mm",
    "quantize",
    "quantize_",
    "quantize_blockwise_int8",
    "quantize_fp8",
    "quantize_int8",
    "requantized_mm",
    "rms_norm",
    "rms_norm_quant",
    "scaled_bmm",
    "scaled_mm",
    "scaled_mm_azp",
    "schemes",
    "set_batch_invariant",
    "silu_and_mul",
    "silu_and_mul_quant",
    "supports",
    "table_mm",
    "tune",
    "w4a8_mm",
    "weight_only_mm",
]

# A third of the time of an import, and of no use to those who call operations alone: loaded when first asked for.
_ON_DEMAND = ("compat", "formats", "nn", "optimize", "quantize", "schemes")
_FUNCTIONS = {
    **dict.fromkeys(("config", "explain", "set_batch_invariant", "supports"), "introspect"),
    "QuantizedCache": "kv_cache",
    "decode": "generation",
    "optimize_": "optimize",
    "quantize_": "schemes",
    "tune": "tuning.tuner",
}


def _load_tuned_kernels(device: int) -> None:
    """Callback of dispatch before the first product on a device."""
    import_module("epiloq.tuning.store").load(device)


_core.on_first_dispatch(_load_tuned_kernels)


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        return getattr(import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
