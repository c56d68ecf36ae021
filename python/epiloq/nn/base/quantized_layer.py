"""QuantizedLayer: a layer with a quantised weight, and the inputs that layers take."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from epiloq.nn.base.stored_tensors import StoredTensors
from epiloq.nn.base.weight_view import WeightView

# Looked up once, because every call needs it.
_any_autocast = torch._C._is_any_autocast_enabled

# Name of the quantised values in files.
FILES_SAY_WEIGHT: Mapping[str, str] = {"weight": "weight_q"}


class QuantizedLayer(StoredTensors):
    """`StoredTensors` of a layer with a weight: `weight_q`, its scales, and `weight`, which is computed from them."""

    weight_q: Tensor
    bias: Tensor | None
    _version = 2
    """Of the state dict. In version 1 values of 2 and 3 bits had another order."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        written, bits = local_metadata.get("version", self._version), getattr(self, "bits", 8)
        if written < self._version and bits < 4:
            rest[-1].append(  # error_msgs
                f"{type(self).__name__}: {prefix}: expected a state dict of version {self._version}, got {written}, "
                f"whose values of {bits} bits have another order; quantise or open the model again"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the layer that this one replaces (and of its bias); casts change it."""
        return self._dtype if self.bias is None else self.bias.dtype

    @property
    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the float weight: ``[out_features, in_features]``, or a convolution's."""

    @abstractmethod
    def dequantized_weight(self) -> Tensor:
        """The dequantised weight, float32 in `weight_shape`, computed anew by each call."""

    @property
    def weight(self) -> Tensor:
        """The dequantised weight, for code that reads a layer's ``weight``: a tensor of `weight_shape` and `dtype`.

        Nothing is computed until a torch operation uses it; it cannot be written to.
        """
        if is_compiling():
            return self.dequantized_weight().to(self.dtype)
        return WeightView(self)

    @weight.setter
    def weight(self, value: object) -> None:
        self._refuse_weight()

    def _refuse_weight(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}.weight: cannot be replaced, as the layer stores integers and scales: load "
            f"those, or replace the layer by one from {type(self).__name__}.from_linear or a similar function"
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; raises NotImplementedError for a float "weight", which the layer does not have, and for
        the one that is computed, as ``torch.nn.utils.prune`` does by another name."""
        if name == "weight" or isinstance(param, WeightView):
            self._refuse_weight()
        super().register_parameter(name, param)


def check_positive(name: str, **sizes: int) -> None:
    """Raise ValueError, on behalf of the class `name`, for sizes below 1."""
    for argument, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: {argument}: expected at least 1, got {size}")


def convert_input(layer: nn.Module, x: Tensor) -> Tensor:
    """The input of a layer, cast under autocast. Raises TypeError unless it is a tensor, as torch's layers do."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{type(layer).__name__}(): argument 'input' must be Tensor, not {type(x).__name__}")
    expect_dense(layer, x)
    if not is_compiling() and not _any_autocast():
        return x
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


def expect_dense(layer: nn.Module, x: Tensor) -> None:
    """Raise ValueError for a nested, sparse or torch-quantised input, whose values torch would misread."""
    if x.is_nested:
        raise ValueError(
            f"{type(layer).__name__}: x: expected a dense tensor, got a nested one: call the layer with its values() "
            "or a padded tensor"
        )
    if x.layout is not torch.strided or x.is_quantized:
        kind, call = ("torch's quantised", "dequantize") if x.is_quantized else (x.layout, "to_dense")
        raise ValueError(f"{type(layer).__name__}: x: expected a dense tensor, got a {kind} one: call it with {call}()")
