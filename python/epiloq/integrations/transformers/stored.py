"""Linear layers as a file has them, for transformers to load, and the checks that come before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats.checkpoint import Checkpoint
from epiloq.formats.layouts import FormatError
from epiloq.integrations.transformers.kinds import Kind
from epiloq.integrations.transformers.names import FLOATS, INTEGERS, Header, Names, check, where

# Types by the names that safetensors gives them.
_FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
_TYPES = FLOATS | INTEGERS | _FP8


class StoredLinear(nn.Module):
    """The tensors of a quantised linear layer as a file holds them, until the module that runs it is made of them."""

    def __init__(self, linear: nn.Linear, parts: Mapping[str, Header], origin: str) -> None:
        super().__init__()
        self.origin = origin
        # In a tuple, for it is no part of this module.
        self.replaced = (linear,)
        for name, (kind, shape) in parts.items():
            self._expect(name, _TYPES[kind], shape)
        # A bias in the file is the layer's, though the model has none: old GPTQ files hold zeros.
        if linear.bias is not None or "bias" in parts:
            self._expect("bias", linear.weight.dtype, [linear.out_features])

    def _expect(self, name: str, dtype: torch.dtype, shape: list[int]) -> None:
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def opened(self, kind: Kind) -> nn.Module:
        """The module that runs the layer, on its tensors' device. Raises FormatError, which names the layer."""
        (linear,) = self.replaced
        tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in self.named_parameters()}
        device = tensors[kind.marker].device
        if any(tensor.is_meta for tensor in tensors.values()):
            raise FormatError(f"{self.origin}: its tensors are offloaded; use a device_map that keeps it on a device")
        bias = tensors.pop("bias", None)
        linear.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        try:
            module = kind.build(linear, tensors)
        except ValueError as error:
            raise FormatError(f"{self.origin}: {error}") from error
        return module.to(device).train(self.training)


def store_layers(model: Any, checkpoint: Checkpoint, kind: Kind) -> None:
    """Put a `StoredLinear` in the place of each quantised layer of `model`, which is on the device "meta".

    Raises FormatError, which names the file and the tensor: a quantised layer that the model lacks, a tensor that the
    files lack, one that is not known, or one of another shape or type.
    """
    headers, names = checkpoint.headers(), Names(model)
    layers: defaultdict[str, dict[str, Header]] = defaultdict(dict)
    for name, header in headers.items():
        layer, _, part = name.rpartition(".")
        layers[layer][part] = header
    quantised = {layer: parts for layer, parts in layers.items() if kind.marker in parts}
    if not quantised:
        raise FormatError(f"{checkpoint.folder}: expected quantised linear layers, found no {kind.marker}")
    for layer, parts in quantised.items():
        origin = where(checkpoint, f"{layer}.{kind.marker}")
        own = names.of(f"{layer}.weight").removesuffix(".weight")
        linear = _linear(model, own, origin)
        for part, (dtype, _) in sorted(parts.items()):
            if part not in kind.parts | {"bias"} or dtype not in _TYPES:
                raise FormatError(f"{where(checkpoint, f'{layer}.{part}')}: not a tensor that epiloq knows ({dtype})")
        parent, _, leaf = own.rpartition(".")
        stored = StoredLinear(linear, parts, origin.removesuffix(f".{kind.marker}"))
        setattr(model.get_submodule(parent), leaf, stored)
    check(model, checkpoint, headers)


def _linear(model: Any, name: str, origin: str) -> nn.Linear:
    try:
        found = model.get_submodule(name)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Linear):
        is_what = "nothing of that name" if found is None else type(found).__name__
        raise FormatError(f"{origin}: expected a linear layer {name} in {type(model).__name__}, found {is_what}")
    tied = model.all_tied_weights_keys
    if f"{name}.weight" in {*tied, *tied.values()}:
        raise FormatError(f"{origin}: expected a floating-point weight, for config.json ties it to another")
    return found


def open_layers(model: Any, kind: Kind) -> None:
    """Put the modules that run them in the place of all stored layers. Raises FormatError, which names the layer."""
    for name, module in list(model.named_modules()):
        if isinstance(module, StoredLinear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.opened(kind))
