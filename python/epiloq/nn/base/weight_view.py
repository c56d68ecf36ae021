"""WeightView: the ``weight`` of a quantised layer, computed when it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from epiloq.nn.base.quantized_layer import QuantizedLayer

_COPIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class WeightView(Tensor):
    """The dequantised weight of a quantised layer as a lazy tensor: shape, dtype and device are known, values are not
    stored.

    Some models cast to ``weight.dtype``, or multiply by ``weight`` themselves. Each torch operation computes the
    weight from the layer's current tensors. Writing to it raises NotImplementedError.
    """

    # Tells transformers not to initialise it.
    _is_hf_initialized = True

    _layer: QuantizedLayer

    @staticmethod
    def __new__(cls, layer: QuantizedLayer) -> WeightView:
        made: WeightView = Tensor._make_wrapper_subclass(
            cls, layer.weight_shape, dtype=layer.dtype, device=layer.weight_q.device
        )
        made._layer = layer
        return made

    def dequantize(self) -> Tensor:
        """The values in float32."""
        return self._layer.dequantized_weight()

    # torch would write to a copy, or set an attribute that no operation reads.
    def __setitem__(self, indices: Any, value: Any) -> None:
        self._refuse_write("an assignment to elements")

    @property
    def data(self) -> Tensor:
        """The lazy weight without autograd, as of any tensor."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        self._refuse_write("an assignment to data")

    def _refuse_write(self, got: object) -> NoReturn:
        raise NotImplementedError(
            f"{type(self._layer).__name__}.weight: expected to be read, got {got}; the layer stores integers and "
            "scales: load them, or write to weight_q and its scales"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """The values, as an ordinary tensor."""
        return self.dequantize().to(self.dtype)

    def numpy(self, *, force: bool = False) -> Any:
        """The values, as an array."""
        return self.dequantize().to(self.dtype).numpy(force=force)

    def tolist(self) -> Any:
        """The values, as lists."""
        return self.dequantize().to(self.dtype).tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = type(self._layer).__name__
        return f"WeightView({list(self.shape)}, {self.dtype}, {self.device}, of {name})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _COPIES:
            return cls(args[0]._layer)
        kwargs = kwargs or {}
        for argument, value in (*zip(func._schema.arguments, args, strict=False), *_named(func, kwargs)):
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                value._refuse_write(func)

        def computed(value: Any) -> Any:
            return value._layer.dequantized_weight().to(value.dtype) if isinstance(value, cls) else value

        return func(*tree_map(computed, args), **tree_map(computed, kwargs))


def _named(func: Any, kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
