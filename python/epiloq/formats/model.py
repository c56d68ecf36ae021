"""Models of transformers from directories and to them, in floating point or quantised in any format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from epiloq.formats import deepseek_fp8
from epiloq.formats.architecture import architecture, distinct, skeleton
from epiloq.formats.checkpoint import LARGEST_SHARD, Checkpoint, Writer, carry_over
from epiloq.formats.layouts import FormatError, Quantization
from epiloq.formats.table import Format, Reader, reader
from epiloq.nn import Int8Linear, WeightOnlyLinear
from epiloq.quantize.grid import QuantizedWeight

if TYPE_CHECKING:
    from epiloq.quantize.calibrate import Block

Build = Callable[[nn.Linear, QuantizedWeight, Quantization], nn.Module]


def _int8(linear: nn.Linear, weight: QuantizedWeight, quantization: Quantization) -> nn.Module:
    layer = Int8Linear(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        activation="dynamic" if weight.inputs is None else "static",
        symmetric=quantization.activations == "int8",
        dtype=linear.weight.dtype,
    )
    state = {"weight": weight.q, "weight_scale": weight.scale[:, 0]}
    if weight.inputs is not None:
        state |= {"input_scale": weight.inputs.scale, "input_zero_point": weight.inputs.zero}
    layer.load_state_dict(state | ({} if linear.bias is None else {"bias": linear.bias.detach()}))
    return layer.train(linear.training)


def _weight_only(linear: nn.Linear, weight: QuantizedWeight, quantization: Quantization) -> nn.Module:
    return WeightOnlyLinear.from_packed(weight.pack(), linear.bias).train(linear.training)


# What runs a layer, by how its activations are quantised.
MODULES: dict[str | None, Build] = {"int8": _int8, "int8-azp": _int8, "int8-static": _int8, None: _weight_only}


def load_float(checkpoint: Checkpoint) -> nn.Module:
    """A model that is not quantised, in its own type and evaluation mode.

    Raises FormatError: it is quantised, or its tensors are not those that its configuration asks for.
    """
    if checkpoint.quantization is not None:
        raise FormatError(f"{checkpoint.folder}: expected a model in floating point, but it is quantised already")
    try:
        model, info = architecture(checkpoint).from_pretrained(
            checkpoint.folder,
            dtype="auto",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise FormatError(f"{checkpoint.folder}: {str(error).strip().splitlines()[0]}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            raise FormatError(
                f"{checkpoint.folder}: config.json disagrees with the tensors: "
                f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind]))[:3])}"
            )
    model.eval()
    return model  # type: ignore[no-any-return]


def load(checkpoint: Checkpoint) -> tuple[nn.Module, Quantization | None]:
    """A model of either kind, ready to run, and how it is quantised (None: in floating point, or in FP8 blocks)."""
    if checkpoint.quantization is None:
        return load_float(checkpoint), None
    if checkpoint.quantization.get("quant_method") == deepseek_fp8.METHOD:
        return deepseek_fp8.read(skeleton(checkpoint), checkpoint), None
    found = reader(checkpoint.quantization)
    model = skeleton(checkpoint)
    _fill(model, checkpoint, found)
    return model, found.quantization


@torch.no_grad()
def _fill(model: nn.Module, checkpoint: Checkpoint, found: Reader) -> None:
    """Load every tensor, and put quantised layers in the place of linear ones. Raises FormatError where any differ."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantised = {name for name in linears if f"{name}.{found.marker}" in checkpoint.files}
    if not quantised:
        raise FormatError(f"{checkpoint.folder}: expected quantised linear layers, found no {found.marker}")
    targets = model.state_dict(keep_vars=True)
    absent = set(targets) - {f"{name}.weight" for name in quantised}
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in quantised}
    for name, tensor in checkpoint.tensors():
        layer, _, part = name.rpartition(".")
        if layer in quantised and part != "bias":
            parts[layer][part] = tensor
            continue
        target = targets.get(name)
        if target is None:
            raise FormatError(f"{checkpoint.folder}: {name}: not a tensor of this model")
        if target.shape != tensor.shape or target.is_floating_point() != tensor.is_floating_point():
            raise FormatError(
                f"{checkpoint.folder}: {name}: expected {target.dtype} {list(target.shape)}, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
        target.copy_(tensor)
        # Other names of a tied weight are not in the file.
        absent -= {other for other in absent if targets[other].data_ptr() == target.data_ptr()}
    if absent:
        raise FormatError(f"{checkpoint.folder}: {min(absent)}: expected a tensor, found none")
    for name in sorted(quantised):
        linear = linears[name]
        try:
            weight = found.from_tensors(parts.pop(name), (linear.out_features, linear.in_features))
        except ValueError as error:
            raise FormatError(f"{checkpoint.folder}: {name}: {error}") from error
        if found.quantization.activations == "int8-static":
            static = name not in found.quantization.dynamic
            if static != (weight.inputs is not None):
                raise FormatError(f"{checkpoint.folder}: {name}.input_scale: expected {'one' if static else 'none'}")
        parent, _, leaf = name.rpartition(".")
        setattr(
            model.get_submodule(parent),
            leaf,
            MODULES[found.quantization.activations](linear, weight, found.quantization),
        )


def save(
    model: nn.Module,
    blocks: Iterable[Block],
    source: Checkpoint,
    folder: Path,
    layout: Format,
    quantization: Quantization,
    largest_shard: int = LARGEST_SHARD,
) -> None:
    """Write a calibrated model into a new `folder`: finished blocks' layers in a format, all else as the model has it.

    Raises FormatError for what the format cannot say.
    """
    writer = Writer(folder, largest_shard)
    dtype = next(model.parameters()).dtype
    quantised = set()
    for block in blocks:
        for name, weight in block.weights.items():
            for part, tensor in layout.to_tensors(weight, quantization, dtype).items():
                writer.add(f"{name}.{part}", tensor)
            quantised.add(name)
    for name, tensor in distinct(model).items():
        if name.removesuffix(".weight") not in quantised:
            writer.add(name, tensor)
    ignore = sorted(n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in quantised)
    writer.close(source.config | {"quantization_config": layout.config(quantization, ignore)})
    carry_over(source.folder, folder)
