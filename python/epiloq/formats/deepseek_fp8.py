"""Checkpoints as DeepSeek-V3's: FP8 weights with a scale for each 128 x 128 block.

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
from epiloq.formats.io.checkpoint import LARGEST_SHARD, Checkpoint, Writer, written_whole
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.weights import BlockWeight, ModuleWeight
from epiloq.models.mixtures import left_beside, named_layers, release_, together_
from epiloq.nn import ExpertLinears, Fp8BlockLinear
from epiloq.nn.base.prepared_linear import FP8_BLOCK as BLOCK
from epiloq.nn.experts.gating import OwnGate

METHOD = fp8.METHOD
SCALE = "weight_scale_inv"
# Powers of two of float8_e4m3fn, whose numbers have four significant bits: 2^-9 (a subnormal one) to 2^8.
_HIGHEST, _SPAN = 8, 17
# Below every exponent of float32.
_FAR = -1000


def save(model: nn.Module, folder: str | Path, largest_shard: int = LARGEST_SHARD) -> None:
    """Write a model of transformers with ``Fp8BlockLinear`` layers (scheme "fp8-block") into a new `folder`.

    The folder appears by one rename when all is written. A tokenizer is saved beside by its own ``save_pretrained``.

    transformers divides a weight evenly into as many blocks as there are scales when it dequantises, which is wrong
    for sizes above 128 that are no multiples of it; such layers are warned of.

    Raises FormatError where `folder` exists, or for another quantised layer, or none of this kind.
    """
    with written_whole(folder) as aside:
        write(model, model_config(model), aside, largest_shard)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(aside)  # type: ignore[operator,union-attr]


def write(model: nn.Module, source: Mapping[str, Any], folder: Path, largest_shard: int = LARGEST_SHARD) -> None:
    """As `save`, without a rename; `source` is the config.json to begin with."""
    layers = {name: module for name, module in named_layers(model) if isinstance(module, Fp8BlockLinear)}
    if not layers:
        raise FormatError("deepseek_fp8: model: expected Fp8BlockLinear layers (scheme fp8-block), found none")
    _check_others(model)
    warn_of({name: (layer.out_features, layer.in_features) for name, layer in layers.items()})
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    left = {*linears, *left_beside(model, layers)}
    writer = Writer(folder, largest_shard)
    for name, tensor in distinct(model).items():
        writer.add(name, tensor)
    writer.close({**source, "quantization_config": fp8.config(left)})


def blocks_of_mxfp4(weight: ModuleWeight) -> BlockWeight:
    """An MXFP4 weight as FP8 blocks of the same numbers.

    E2M1 numbers are 1 or 3 times a power of two, as are their products with scales of E8M0. E4M3 represents those from
    ``2^-9`` to ``2^8``, times any power of two for a block: so a block of 128 x 128 can be represented if and only if
    the lowest set bit of every number in it lies at most 17 binary places below the highest bit of its largest. If the
    scales in a block differ by no more than ``2^14`` that always holds. Raises FormatError for a block of which it does
    not, and for NaN and infinite numbers.
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
    """Warn of layers, by name, of sizes that transformers dequantises wrongly."""
    uneven = [name for name, shape in shapes.items() if any(size > BLOCK and size % BLOCK for size in shape)]
    if uneven:
        warnings.warn(
            f"transformers dequantises {len(uneven)} layers wrongly, whose sizes are not multiples of {BLOCK}: "
            f"{uneven[0]}, ..",
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
    """The model of transformers in a directory, in its own type and evaluation mode, with ``Fp8BlockLinear`` layers.

    Activations are quantised with float32 scales, whatever "scale_fmt" says. Pickles are never opened.

    Raises FormatError, which names the file and the tensor: a scale that is missing or of another shape or type, a
    tensor that the model lacks or that the files lack, a configuration of another kind.
    """
    checkpoint = Checkpoint(folder)
    return read(skeleton(checkpoint), checkpoint)


def read(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """Fill any `model` whose tensors a checkpoint names, in place, and return it.

    Its linear layers that are FP8 in the checkpoint become ``Fp8BlockLinear``, experts ``GatedExperts``. All is checked
    before anything changes. Raises FormatError as `load` does.
    """
    from epiloq.formats.io import model as models
    from epiloq.formats.layers import Layers

    if (found := (checkpoint.quantization or {}).get("quant_method")) != METHOD:
        where = checkpoint.folder / "config.json"
        raise FormatError(f"{where}: quantization_config: quant_method: expected {METHOD}, got {found!r}")
    try:
        layers = Layers(checkpoint, model)
        models.fill(layers)
        release_(model)
        return model
    finally:
        together_(model)
