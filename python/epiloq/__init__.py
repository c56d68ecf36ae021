"""epiloq: quantised matrix multiplication for PyTorch.

`scaled_mm`, `scaled_mm_azp`, `quantize_int8` and `weight_only_mm` (of a `PackedWeight`) work on torch tensors, on a
CUDA device and on the CPU alike; `nn` and `quantize_` put them into models; `explain`, `supports` and `config` say and
steer what runs; `quantize` holds the algorithms, `compat` other libraries' names.
"""

from importlib.util import find_spec

from epiloq import _core as _core

# The build environment of a C++ project may lack torch, and asks for folders alone (`python -m epiloq --cmake-dir`).
if find_spec("torch") is not None:
    from epiloq import compat as compat
    from epiloq import nn as nn
    from epiloq import quantize as quantize
    from epiloq import schemes as schemes
    from epiloq.introspect import config, explain, supports
    from epiloq.ops import quantize_int8, scaled_mm, scaled_mm_azp, weight_only_mm
    from epiloq.packed_weight import PackedWeight, pack_weight
    from epiloq.schemes import quantize_

__version__: str = _core.__version__

__all__ = [
    "PackedWeight",
    "__version__",
    "compat",
    "config",
    "explain",
    "nn",
    "pack_weight",
    "quantize",
    "quantize_",
    "quantize_int8",
    "scaled_mm",
    "scaled_mm_azp",
    "schemes",
    "supports",
    "weight_only_mm",
]
