"""Checkpoints in DeepSeek-V3's format: FP8 weights with a scale per 128 x 128 block.

A quantised layer has ``weight`` float8_e4m3fn ``[N, K]`` and ``weight_scale_inv`` float32
``[ceil(N / 128), ceil(K / 128)]``, so that W = q * scale_inv; config.json has a ``quantization_config`` of method
"fp8", which transformers (``FineGrainedFP8Config``), vLLM and SGLang read.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats.configs import fp8
from epiloq.formats.io.architecture import distinct, model_config, skeleton
from epiloq.formats.io.checkpoint import LARGEST_SHARD, Checkpoint, Writer, atomic_folder
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.weights import BlockWeight, ModuleWeight
from epiloq.models.in_memory import describe_on_saving
from epiloq.models.mixtures import named_layers, release_float_experts_, restack_experts_, unquantised_neighbours
from epiloq.nn import ExpertLinears, Fp8BlockLinear
from epiloq.nn.base.prepared_linear import FP8_BLOCK as BLOCK
from epiloq.nn.experts.gating import OwnGate

METHOD = fp8.METHOD
SCALE = "weight_scale_inv"
# Exponents of float8_e4m3fn, which has four significant bits: 2^-9 (subnormal) to 2^8.
_HIGHEST, _SPAN = 8, 17
# An exponent below all of float32.
_FAR = -1000


def save(model: nn.Module, folder: str | Path, largest_shard: int = LARGEST_SHARD) -> None:
    """Write a model of transformers with ``Fp8BlockLinear`` layers (scheme "fp8-block") into a new `folder`.

    The folder is written atomically. Save a tokenizer into it with its own ``save_pretrained``.

    When transformers dequantises, it divides a weight into as many equal blocks as there are scales, which is wrong for
    sizes above 128 that are not multiples of it; such layers cause a warning. Raises FormatError if `folder` exists,
    for other quantised layers, or if there is none of this kind.
    """
    with atomic_folder(folder) as temporary:
        write(model, model_config(model), temporary, largest_shard)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(temporary)  # type: ignore[operator,union-attr]


def write(model: nn.Module, source: Mapping[str, Any], folder: Path, largest_shard: int = LARGEST_SHARD) -> None:
    """Do what `save` does, but directly in `folder`; `source` is the config.json to extend."""
    layers = {name: module for name, module in named_layers(model) if isinstance(module, Fp8BlockLinear)}
    if not layers:
        raise FormatError("deepseek_fp8: model: expected Fp8BlockLinear layers (scheme fp8-block), found none")
    _check_others(model)
    warn_of({name: (layer.out_features, layer.in_features) for name, layer in layers.items()})
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    left = {*linears, *unquantised_neighbours(model, layers)}
    writer = Writer(folder, largest_shard)
    for name, tensor in distinct(model).items():
        writer.add(name, tensor)
    writer.close({**source, "quantization_config": fp8.config(left)})


def blocks_of_mxfp4(weight: ModuleWeight) -> BlockWeight:
    """Convert an MXFP4 weight exactly to FP8 blocks.

    E2M1 numbers are 1 or 3 times a power of two, and so are their products with E8M0 scales. E4M3 represents these from
    ``2^-9`` to ``2^8``, times any power of two per block. So a 128 x 128 block is representable if and only if the
    lowest set bit of each of its numbers is at most 17 binary places below the highest bit of its largest one. This
    always holds if the scales in a block differ by at most ``2^14``. Raises FormatError for a block that is not
    representable, and for NaN and infinity.
    """
    values = weight.dequantize()
    q = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-values.shape[0] // BLOCK), -(-values.shape[1] // BLOCK))
    for stripe, first in enumerate(range(0, values.shape[0], BLOCK)):
        rows = values[first : first + BLOCK]
        if not bool(rows.isfinite().all()):
            raise FormatError("deepseek-fp8: cannot represent NaN or infinite numbers of an MXFP4 weight")
        exponent = _exponents(rows, stripe)
        scales[stripe] = torch.ldexp(torch.ones_like(scales[stripe]), exponent)
        spread = scales[stripe].repeat_interleave(BLOCK)[: values.shape[1]]
        q[first : first + BLOCK].view(torch.uint8).copy_((rows / spread).to(q.dtype).view(torch.uint8))
    return BlockWeight(q, scales)


def _exponents(rows: Tensor, stripe: int) -> Tensor:
    """The exponent of each block's scale, for up to 128 rows of numbers that are 1 or 3 times a power of two."""
    padded = nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    mantissa, exponent = torch.frexp(padded)
    there, three = padded != 0, mantissa.abs() == 0.75
    highest = torch.where(there, exponent - 1, _FAR).amax((0, 2))
    lowest = torch.where(there, exponent - 1 - three.int(), -_FAR).amin((0, 2))
    wide = (highest > _FAR) & (highest - lowest > _SPAN)
    if bool(wide.any()):
        column = int(wide.nonzero()[0, 0])
        raise FormatError(
            f"deepseek-fp8: cannot represent this MXFP4 weight: block [{stripe}, {column}] of {BLOCK} x {BLOCK} "
            f"reaches from 2^{int(lowest[column])} to 2^{int(highest[column])}, more than 2^{_SPAN}, "
            "which float8_e4m3fn spans"
        )
    return torch.where(highest > _FAR, (highest - _HIGHEST).clamp(min=-126), 0)


def warn_of(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Warn of layers, given by name, with sizes that transformers dequantises wrongly."""
    uneven = [name for name, shape in shapes.items() if any(size > BLOCK and size % BLOCK for size in shape)]
    if uneven:
        warnings.warn(
            f"transformers dequantises {len(uneven)} layers wrongly, because their sizes are not multiples of {BLOCK}: "
            f"{uneven[0]}, …",
            stacklevel=4,
        )


def _check_others(model: nn.Module) -> None:
    for name, module in named_layers(model):
        if isinstance(module, Fp8BlockLinear) and module.rows != BLOCK:
            raise FormatError(
                f"deepseek_fp8: {name}: expected blocks of {BLOCK} x {BLOCK}, got {module.rows} x {BLOCK}"
            )
        if type(module).__module__.startswith("epiloq.nn") and not isinstance(
            module, (Fp8BlockLinear, ExpertLinears, OwnGate)
        ):
            raise FormatError(f"deepseek_fp8: {name}: expected Fp8BlockLinear, got {type(module).__name__}")


def load(folder: str | Path) -> nn.Module:
    """Load the transformers model in a directory, in its own dtype and evaluation mode, with ``Fp8BlockLinear`` layers.

    Activations are quantised with float32 scales, whatever "scale_fmt" says. Pickles are never opened.

    Raises FormatError, which names the file and the tensor, for a scale that is missing or has a wrong shape or dtype,
    missing or unexpected tensors, and other kinds of configuration.
    """
    checkpoint = Checkpoint(folder)
    return read(skeleton(checkpoint), checkpoint)


def read(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """Load a checkpoint into a `model` with the same tensor names, in place, and return it.

    Its linear layers that are FP8 in the checkpoint become ``Fp8BlockLinear``, experts ``GatedExperts``. Everything is
    checked before anything changes. Raises FormatError as `load` does.
    """
    from epiloq.formats.io import model as models
    from epiloq.formats.layers import Layers

    if (found := (checkpoint.quantization or {}).get("quant_method")) != METHOD:
        where = checkpoint.folder / "config.json"
        raise FormatError(f"{where}: quantization_config: quant_method: expected {METHOD}, got {found!r}")
    try:
        layers = Layers(checkpoint, model)
        models.fill(layers)
        release_float_experts_(model)
        describe_on_saving(model)
        return model
    finally:
        restack_experts_(model)
