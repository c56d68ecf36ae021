"""Checkpoints in the manner of DeepSeek-V3: FP8 weights with a scale for each 128 x 128 block.

A quantised layer has ``weight`` float8_e4m3fn ``[N, K]`` and ``weight_scale_inv`` float32
``[ceil(N / 128), ceil(K / 128)]``, so that W = q * scale_inv; config.json has a ``quantization_config`` of method
"fp8", which transformers (``FineGrainedFP8Config``), vLLM and SGLang read.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats.io.architecture import distinct, has_no_use_for, model_config, renamed, skeleton
from epiloq.formats.io.checkpoint import LARGEST_SHARD, Checkpoint, Writer, written_whole
from epiloq.formats.layouts.base import FormatError
from epiloq.mixtures import left_beside, named_layers, release_, together_, why_stacked
from epiloq.nn import ExpertLinears, Fp8BlockLinear
from epiloq.nn.prepared_linear import FP8_BLOCK as BLOCK

METHOD = "fp8"
SCALE = "weight_scale_inv"

# Types as safetensors names them.
_FP8 = ("F8_E4M3",)
_FLOATS = ("BF16", "F16", "F32", "F64")
_INTEGERS = ("BOOL", "I8", "I16", "I32", "I64", "U8")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")

# What the configuration must say, where it says anything.
_KNOWN: dict[str, tuple[Any, ...]] = {
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
}


def config(not_converted: Collection[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model in which the named layers, routers among them, stay in floating point."""
    return {
        "quant_method": METHOD,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(not_converted),
    }


def save(model: nn.Module, folder: str | Path, largest_shard: int = LARGEST_SHARD) -> None:
    """Write a model of transformers with ``Fp8BlockLinear`` layers (scheme "fp8-block") into a new `folder`.

    The folder appears by one rename when all is written. A tokenizer is saved beside by its own ``save_pretrained``.

    transformers divides a weight evenly into as many blocks as there are scales when it de-quantises, which is wrong
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
    writer.close({**source, "quantization_config": config(left)})


def warn_of(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Warn of layers, by name, of sizes that transformers de-quantises wrongly."""
    uneven = [name for name, shape in shapes.items() if any(size > BLOCK and size % BLOCK for size in shape)]
    if uneven:
        warnings.warn(
            f"transformers de-quantises {len(uneven)} layers wrongly, whose sizes are not multiples of {BLOCK}: "
            f"{uneven[0]}, ..",
            stacklevel=4,
        )


def _check_others(model: nn.Module) -> None:
    for name, module in named_layers(model):
        if type(module).__module__.startswith("epiloq.nn") and not isinstance(module, (Fp8BlockLinear, ExpertLinears)):
            raise FormatError(f"deepseek_fp8: {name}: expected Fp8BlockLinear, got {type(module).__name__}")


def load(folder: str | Path) -> nn.Module:
    """The model of transformers in a directory, in its own type and evaluation mode, with ``Fp8BlockLinear`` layers.

    Activations are quantised with float32 scales, whatever "scale_fmt" says. Pickles are never opened.

    Raises FormatError, which names the file and the tensor: a scale that is missing or of another shape or type, a
    tensor that the model lacks or that the files lack, a configuration of another kind.
    """
    checkpoint = Checkpoint(folder)
    return read(skeleton(checkpoint), checkpoint)


@torch.no_grad()
def read(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """Fill any `model` whose tensors a checkpoint names, in place, and return it.

    Its linear layers that are FP8 in the checkpoint become ``Fp8BlockLinear``, experts ``GatedExperts``. All is checked
    before anything changes. Raises FormatError as `load` does.
    """
    check_config(checkpoint)
    try:
        return _fill(renamed(model, checkpoint), checkpoint)
    finally:
        together_(model)


def _fill(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """`read`, into a model whose experts are apart."""
    targets = model.state_dict(keep_vars=True)
    layers = _checked(model, targets, checkpoint)
    for name, linear in layers.items():
        layer = Fp8BlockLinear(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.train(linear.training))
    release_(model)
    for name, tensor in checkpoint.tensors():
        layer_name, _, part = name.rpartition(".")
        if layer_name in layers:
            model.get_submodule(layer_name).load_state_dict({part: tensor}, strict=False)
        elif not has_no_use_for(model, name):
            targets[name].copy_(tensor)
    return model


def check_config(checkpoint: Checkpoint) -> None:
    """Raise FormatError, which names the file, for a configuration of another kind."""
    try:
        parse(checkpoint.quantization or {})
    except FormatError as error:
        raise FormatError(f"{checkpoint.folder / 'config.json'}: {error}") from None


def parse(found: Mapping[str, Any]) -> None:
    """Raise FormatError for a ``quantization_config`` of another kind."""
    for key, known in _KNOWN.items():
        if found.get(key, known[0]) not in known:
            expected = " or ".join(map(str, known))
            raise FormatError(f"quantization_config: {key}: expected {expected}, got {found[key]!r}")
    if found.get("quant_method") != METHOD:
        raise FormatError(f"quantization_config: quant_method: expected {METHOD}, got {found.get('quant_method')!r}")


def _checked(model: nn.Module, targets: Mapping[str, Tensor], checkpoint: Checkpoint) -> dict[str, nn.Linear]:
    """The linear layers that a checkpoint has in FP8, after every one of its tensors was compared with the model's."""
    headers = checkpoint.headers()
    expected: dict[str, tuple[tuple[str, ...], list[int]]] = {
        name: (_FLOATS if tensor.is_floating_point() else _INTEGERS, list(tensor.shape))
        for name, tensor in targets.items()
    }
    layers: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and headers.get(f"{name}.weight", ("", []))[0] in _FP8:
            layers[name] = module
            expected[f"{name}.weight"] = (_FP8, [module.out_features, module.in_features])
            blocks = [-(-module.out_features // BLOCK), -(-module.in_features // BLOCK)]
            expected[f"{name}.{SCALE}"] = (_SCALES, blocks)
    for name, (dtype, shape) in headers.items():
        where = checkpoint.where(name)
        if name not in expected and has_no_use_for(model, name):
            continue
        if name not in expected:
            raise FormatError(f"{where}: not a tensor of this model{why_stacked(model, name)}")
        dtypes, wanted = expected[name]
        if dtype not in dtypes or shape != wanted:
            raise FormatError(f"{where}: expected {' or '.join(dtypes)} {wanted}, got {dtype} {shape}")
    # Other names of a tied weight are not in the files.
    present = {targets[name].data_ptr() for name in headers if name in targets}
    for name in sorted(expected.keys() - headers.keys()):
        if name not in targets or targets[name].data_ptr() not in present:
            beside = checkpoint.files.get(name.removesuffix("_scale_inv"), "")
            raise FormatError(f"{checkpoint.folder / beside}: {name}: expected a tensor, found none")
    return layers
