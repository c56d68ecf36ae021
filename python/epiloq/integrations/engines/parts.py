"""Layers of epiloq's own format in engines, which merge layers and divide them among ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from epiloq.formats import epiloq_modules
from epiloq.formats.epiloq_modules import Group, Options
from epiloq.formats.layouts.base import FormatError, located
from epiloq.integrations.engines.slices import Window, rules_of
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.prepared_linear import PreparedLinear, padded


def layers_by_name(config: Mapping[str, Any]) -> dict[str, Group]:
    """The kinds of the quantised layers of a ``quantization_config``, by name. Raises FormatError for unsupported
    entries."""
    return {layer: group for group in epiloq_modules.parse(config) for layer in group.layers}


@dataclass
class Part:
    """The part of one checkpoint layer that a rank runs, while its tensors are loaded.

    name
        The layer's name, for messages.
    group
        Its kind; None for a layer in floating point.
    columns
        The rank's inputs, out of `in_features`.
    """

    name: str
    group: Group | None
    columns: tuple[int, int]
    in_features: int
    window: Window | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, options = (None, {}) if self.group is None else (self.group.module, self.group.options)
        self.rules = rules_of(module, options)

    def take(self, name: str, tensor: Tensor, rows: tuple[int, int], device: torch.device) -> None:
        """Keep the part of one of the layer's tensors that belongs to these rows, as stored.

        Raises FormatError for a tensor that such a layer does not have, and for activation order if the inputs are
        divided among ranks.
        """
        if name not in self.rules:
            raise FormatError(f"{self.name}: expected of this layer {', '.join(self.rules)}, got {name}")
        if name == "weight_perm" and self.columns != (0, self.in_features):
            raise FormatError(f"{self.name}: expected no activation order where inputs are divided among ranks")
        self.window = Window.of(self.rules, rows, self.columns, self.in_features)
        axes = self.rules[name]
        if axes and tensor.ndim != len(axes):
            raise FormatError(f"{self.name}.{name}: expected {len(axes)} dimensions, got {list(tensor.shape)}")
        # A copy, so that what is not needed can be released; float8 as bytes, which every backend copies.
        values = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        kept = self.window.cut(values, axes).to(device, copy=True).contiguous().view(tensor.dtype)
        self.tensors[name] = kept

    def module(self, dtype: torch.dtype) -> nn.Module:
        """The module that runs the part. Raises FormatError for tensors that are missing or do not fit."""
        if self.window is None or not self.tensors:
            raise FormatError(f"{self.name}: expected tensors, found none")
        outputs, inputs = self.window.shape
        outline = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)
        if self.group is None:
            weight = self.tensors["weight"].to(dtype)
            if weight.shape != outline.weight.shape:
                raise FormatError(f"{self.name}: expected [{outputs}, {inputs}], got {list(weight.shape)}")
            outline.weight = nn.Parameter(weight, requires_grad=False)
            return outline.eval()
        device = next(iter(self.tensors.values())).device
        with located(self.name):
            module: nn.Module = self.group.kind.build(outline, self.group.options, self.tensors, device)
        return module.eval()


class PartsLinear(nn.Module):
    """Modules of several parts with concatenated outputs: one product if they could be merged, otherwise one per part.

    ``forward(x, bias)`` takes `x` ``[…, in_features]`` of the rank and `bias` ``[out_features]`` or None.
    """

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        super().__init__()
        parts = merged(parts)
        self.products = nn.ModuleList(part.module(dtype) for part in parts)
        windows = [cast(Window, part.window) for part in parts]
        self.spare = [window.spare for window in windows]
        self.sizes = [window.rows[1] - window.rows[0] for window in windows]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        biases = [None] * len(self.sizes) if bias is None else bias.split(self.sizes)
        outputs = []
        for product, (above, left, right), part in zip(self.products, self.spare, biases, strict=True):
            given = nn.functional.pad(x, (left, right)) if left or right else x
            if part is not None and above:
                part = nn.functional.pad(part, (above, 0))
            y = product_of(product, given, part)
            outputs.append(y[..., above:] if above else y)
        return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, -1)


def product_of(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """The output of a layer with another bias, or none."""
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, module.weight, bias)
    layer = cast(FrozenLinear, module)
    tensors = list(layer._parts())
    if bias is not None and isinstance(layer, PreparedLinear):
        bias = padded(bias, layer._padded_shapes["bias"])
    tensors[1] = bias
    return layer._run(x, *tensors)


def merged(parts: Sequence[Part]) -> list[Part]:
    """Merge parts into one module if possible; otherwise return the parts.

    Parts can be merged if they have the same kind and options, complete units of rows, and equal values of everything
    that all rows share. FP8 scales per tensor become scales per channel.
    """
    first = parts[0]
    if len(parts) == 1 or any(part.window is None or part.group is None for part in parts):
        return list(parts)
    alike = [_by_channel(part) for part in parts]
    kinds = {(part.group.module, repr(sorted(part.group.options.items()))) for part in alike if part.group is not None}
    names = {frozenset(part.tensors) for part in alike}
    if len(kinds) > 1 or len(names) > 1:
        return list(parts)
    units = [axis[1] for axes in alike[0].rules.values() for axis in axes if axis is not None and axis[0] == "rows"]
    windows = [cast(Window, part.window) for part in alike]
    if any(size % unit for window in windows[:-1] for size in (window.shape[0],) for unit in units):
        return list(parts)
    if any(window.spare[0] for window in windows):
        return list(parts)
    tensors: dict[str, Tensor] = {}
    for name, axes in alike[0].rules.items():
        if name not in alike[0].tensors:
            continue
        found = [part.tensors[name] for part in alike]
        if any(axis is not None and axis[0] == "rows" for axis in axes):
            together = torch.cat([t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in found])
            tensors[name] = together.view(found[0].dtype)
        elif all(torch.equal(found[0], other) for other in found[1:]):
            tensors[name] = found[0]
        else:
            return list(parts)
    rows = (0, sum(window.shape[0] for window in windows))
    whole = Part(first.name, alike[0].group, first.columns, first.in_features)
    whole.window = Window(rows, first.columns, 0, windows[0].first_column, windows[0].last_column, first.in_features)
    whole.tensors = tensors
    return [whole]


def _by_channel(part: Part) -> Part:
    """Expand an FP8 scale per tensor to one per row; the product is the same."""
    group, window = cast(Group, part.group), cast(Window, part.window)
    if group.module != "Fp8Linear" or group.options["weight"] != "tensor" or "weight_scale" not in part.tensors:
        return part
    options: Options = {**group.options, "weight": "channel"}
    again = Part(part.name, Group(group.module, options, group.layers), part.columns, part.in_features, window)
    scale = part.tensors["weight_scale"].reshape(1).expand(window.shape[0]).contiguous()
    again.tensors = {**part.tensors, "weight_scale": scale}
    return again
