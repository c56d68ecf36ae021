"""GPT-OSS's own checkpoints, ``quant_method`` "mxfp4": experts in blocks of FP4, all else in floating point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from epiloq.formats.configs.keys import check_keys, excludes, names
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.safetensors_file import DTYPES
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp4Experts

METHOD = "mxfp4"
_KNOWN = {"quant_method", "modules_to_not_convert"}
_MARKER = "gate_up_proj_blocks"


def store_experts_(model: Any, checkpoint: Checkpoint, said: Mapping[str, Any]) -> None:
    """Put `Fp4Experts` in the place of the experts of which a checkpoint has blocks, for transformers to load.

    `said` is the ``quantization_config``. Raises FormatError, which names file and tensor: an entry that is not read,
    no such experts, experts of another model than GPT-OSS, or tensors of other types or shapes.
    """
    check_keys(said, _KNOWN, METHOD)
    left = names(said, "modules_to_not_convert", METHOD)
    found = [name.rpartition(".")[0] for name in checkpoint.files if name.rpartition(".")[2] == _MARKER]
    if not found:
        raise FormatError(f"{checkpoint.folder}: expected experts in blocks of FP4 ({_MARKER}), found none")
    for name in found:
        where = checkpoint.where(f"{name}.{_MARKER}")
        if excludes(left, name):
            raise FormatError(f"{where}: belongs to quantised experts, but config.json leaves them in floating point")
        made = _made(_module(model, name, where), where)
        for part, shape in made.shapes(made.experts, made.hidden, made.intermediate).items():
            entry = checkpoint.entries.get(f"{name}.{part}")
            held = made.get_parameter(part)
            if entry is None:
                raise FormatError(f"{checkpoint.folder}: {name}.{part}: expected a tensor, found none")
            right = held.is_floating_point() or DTYPES[entry.dtype] == held.dtype
            if not right or tuple(entry.shape) != shape:
                raise FormatError(
                    f"{checkpoint.where(f'{name}.{part}')}: expected {held.dtype} {list(shape)}, "
                    f"got {entry.dtype} {list(entry.shape)}"
                )
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made)


def settle_experts_(model: nn.Module) -> None:
    """Freeze what transformers loaded. Raises FormatError, which names the tensor, for one without values."""
    for name, module in model.named_modules():
        if isinstance(module, Fp4Experts):
            offloaded = next((part for part, tensor in module.named_parameters() if tensor.is_meta), None)
            if offloaded is not None:
                raise FormatError(
                    f"{name}.{offloaded}: its values are offloaded; use a device_map that keeps them on a device"
                )
            module.requires_grad_(False)._settle()


def _module(model: Any, name: str, where: str) -> Any:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise FormatError(f"{where}: expected experts {name} in {type(model).__name__}, found none") from None
    if type(module).__name__ != "GptOssExperts":
        raise FormatError(f"{where}: expected GptOssExperts, found {type(module).__name__}")
    return module


def _made(module: Any, where: str) -> Fp4Experts:
    try:
        made = Fp4Experts(
            module.num_experts,
            module.hidden_size,
            module.intermediate_size,
            alpha=module.alpha,
            limit=module.limit,
            device="meta",
            dtype=module.gate_up_proj.dtype,
        )
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from None
    return made.train(module.training)
