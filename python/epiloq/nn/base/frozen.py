"""Gradients of layers whose quantised weights are frozen: the input's, ``dx = dy W``, and the bias's.

W is the dequantised weight. Activations may be quantised, which the gradient ignores (straight-through estimator).
One `torch.autograd.Function` is used for all layers, in eager mode, under ``torch.compile`` and under
``torch.func``'s transforms; calls without gradients do not use it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from epiloq._torch.calls import is_traced, is_transformed
from epiloq.nn.base.quantized_layer import QuantizedLayer, check_positive
from epiloq.weights.computed import check_bias, check_finite, check_readable, refresh

_Linear = TypeVar("_Linear", bound="FrozenLinear")

# Elements of a weight that are dequantised at a time.
_CHUNK = 1 << 24
# Chunks begin at multiples of this, the largest number of rows that share scales (FP8 blocks) or bytes (16, packed).
_ROWS = 128


class Frozen(QuantizedLayer):
    """A layer that is a function of its input, its bias and tensors that are not trained.

    The methods below take the kernels' tensors, in the order of the arguments of `_call`.
    """

    clamp: tuple[float, float] | None = None

    @abstractmethod
    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        """The layer's output, computed by the quantised kernels."""

    @abstractmethod
    def _push(self, x: Tensor, *tensors: Any) -> Tensor:
        """``x W^T`` in floating point."""

    @abstractmethod
    def _pull(self, dy: Tensor, shape: torch.Size, *tensors: Any) -> Tensor:
        """``dy W`` in floating point, in the shape of the input."""

    @abstractmethod
    def _spread(self, bias: Tensor) -> Tensor:
        """The bias, broadcast for adding to an output."""

    @abstractmethod
    def _gather(self, dy: Tensor) -> Tensor:
        """The sum over each channel of an output."""

    def _call(self, x: Tensor, tensors: Sequence[Any]) -> Tensor:
        """The layer's output, with gradients if they are needed."""
        bias = self._stored("bias")
        if torch.is_grad_enabled():
            self._refuse_gradients()
            tensors = [t.detach() if t is not None and t.requires_grad else t for t in tensors]
        if is_dynamo_compiling():
            if torch._C._are_functorch_transforms_active():
                return _added(self, x, bias, *tensors)
            function: Any = _Gradient
            # torch.compile rejects a tensor passed twice, so a bias without a gradient is passed only in `tensors`.
            bias = bias if bias is not None and bias.requires_grad else None
        else:
            function = _GradientOfAnyOrder
        if wants_gradient(x, bias):
            return cast(Tensor, function.apply(self, x, bias, *tensors))
        return self._run(x, *tensors)

    def _refuse_gradients(self) -> None:
        """Refuse gradients for all tensors except the bias."""
        for name, tensor in self._parameters.items():
            if name != "bias" and tensor is not None and tensor.requires_grad:
                raise NotImplementedError(
                    f"epiloq.nn.{type(self).__name__} has no gradient of {name}, which is frozen: expected one with"
                    " requires_grad False (the input and the bias have gradients)"
                )


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be needed; not under a tracer, which records operations only."""
    if is_traced():
        return False
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return True
    if is_dynamo_compiling():  # transforms are then not visible in requires_grad
        return torch._C._are_functorch_transforms_active()
    return is_transformed() or forward_ad._current_level >= 0


class _Gradient(torch.autograd.Function):
    """The gradient of a `Frozen` layer, in a form that torch.compile supports."""

    @staticmethod
    def forward(layer: Frozen, x: Tensor, bias: Tensor | None, *tensors: Tensor | None) -> Tensor:
        y = layer._run(x, *tensors)
        # Not a view for autograd, which forbids in-place writes (by ReLU) to views returned by a function, and not
        # the result of `contiguous`, whose gradient torch.compile of torch 2.11 drops.
        return cast(Tensor, torch.ops.aten._unsafe_view(y, y.shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        layer, x, bias, *tensors = inputs
        ctx.layer, ctx.shape, ctx.dtype = layer, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        saved = [*tensors, None if layer.clamp is None else output]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        layer, (*tensors, output) = ctx.layer, ctx.saved_tensors
        _, of_x, of_bias, *_ = ctx.needs_input_grad
        if dy is None:  # a function that follows has no gradient
            return None, None, None, *(None for _ in tensors)
        if output is not None:
            dy = _within(layer, output, dy)
        with torch.autocast(dy.device.type, enabled=False):
            dx = layer._pull(dy, ctx.shape, *tensors).to(ctx.dtype) if of_x else None
            dbias = layer._gather(dy).to(ctx.bias_dtype) if of_bias else None
        return None, dx, dbias, *(None for _ in tensors)


class _GradientOfAnyOrder(_Gradient):
    """`_Gradient` with a vmap rule and a forward derivative, which torch.compile does not support."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Gradient.setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)  # missing tangents are None

    @staticmethod
    def jvp(ctx: Any, _: None, dx: Tensor | None, dbias: Tensor | None, *tangents: Tensor | None) -> Tensor:
        layer, (*tensors, output) = ctx.layer, ctx.saved_tensors
        if any(tangent is not None for tangent in tangents):
            raise NotImplementedError(
                f"epiloq.nn.{type(layer).__name__} has no derivative with respect to its frozen tensors"
            )
        if dx is None:
            assert dbias is not None
            dx = dbias.new_zeros(ctx.shape, dtype=ctx.dtype)
        with torch.autocast(dx.device.type, enabled=False):
            dy = layer._push(dx, *tensors)
        if dbias is not None:
            dy = dy + layer._spread(dbias).to(dy.dtype)
        return dy if output is None else _within(layer, output, dy)


def _added(layer: Frozen, x: Tensor, bias: Tensor | None, *tensors: Tensor | None) -> Tensor:
    """The output with the derivatives of a floating-point product, which is added and subtracted again.

    For transforms of torch.func within torch.compile (2.13), which do not support `torch.autograd.Function`.
    """
    y = layer._run(x.detach(), *(None if t is None else t.detach() for t in tensors))
    with torch.autocast(x.device.type, enabled=False):
        product = layer._push(x, *tensors) if x.is_floating_point() else torch.zeros_like(y)
    if bias is not None:
        product = product + layer._spread(bias).to(product.dtype)
    nothing = (product - product.detach()).to(y.dtype)
    return y + (nothing if layer.clamp is None else _within(layer, y, nothing))


def _within(layer: Frozen, output: Tensor, dy: Tensor) -> Tensor:
    """`dy` where the output was not clamped, else 0."""
    assert layer.clamp is not None
    low, high = layer.clamp
    return torch.where((output > low) & (output < high), dy, torch.zeros_like(dy))


class FrozenLinear(Frozen):
    """A `Frozen` layer with a weight ``[out_features, in_features]``."""

    in_features: int
    out_features: int
    _own: tuple[range, range] | None = None
    """Of a shard that also has rows or columns of the whole layer which are not its own, its own ones."""

    @classmethod
    def _like(cls: type[_Linear], linear: nn.Linear, **options: Any) -> _Linear:
        """An unfilled layer with the sizes, device, dtype and mode of `linear`."""
        create: Any = cls
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        layer: _Linear = create(*sizes, **options, device=linear.weight.device, dtype=linear.weight.dtype)
        return layer.train(linear.training)

    @classmethod
    def check_convertible(cls, linear: nn.Module, **options: Any) -> None:
        """Raise ValueError unless ``from_linear``, of a class that has it, supports `linear`: a float ``nn.Linear``
        that is called, with finite weights."""
        name = cls.__name__
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"{name}: linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        if isinstance(linear, NonDynamicallyQuantizableLinear):
            called = "a layer that is called, but MultiheadAttention reads its weight"
            raise ValueError(f"{name}: linear: expected {called}")
        if isinstance(getattr(linear, "weight", None), nn.parameter.UninitializedParameter):
            reason = "its lazy weight has no shape yet; run the model once before quantising it"
            raise ValueError(f"{name}: linear: {reason}")
        refresh(name, linear)
        check_readable(name, linear, "linear")
        check_positive(name, in_features=linear.in_features, out_features=linear.out_features)
        if linear.weight.shape != (linear.out_features, linear.in_features):
            sizes, got = [linear.out_features, linear.in_features], list(linear.weight.shape)
            raise ValueError(f"{name}: linear.weight: expected [out_features, in_features], {sizes}, got {got}")
        check_bias(f"{name}: linear.bias", linear.bias, linear.out_features, linear.weight.device)
        check_finite(f"{name}: linear.weight", linear.weight)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``[out_features, in_features]``; of a shard, the part of the whole weight that is its own."""
        if self._own is not None:
            return len(self._own[0]), len(self._own[1])
        return self.out_features, self.in_features

    def _check_width(self, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            name = type(self).__name__
            raise ValueError(f"{name}: x: expected shape […, {self.in_features}], got {list(x.shape)}")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    @abstractmethod
    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        """Rows of the weight in float32, ``[last - first, in_features]``; `first` is a multiple of 128."""

    @abstractmethod
    def _parts(self) -> Sequence[Any]:
        """The kernels' tensors."""

    def dequantized_weight(self) -> Tensor:
        parts = self._parts()
        chunks = [self._rows(*chunk, *parts) for chunk in self._chunks()]
        weight = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        scale = getattr(self, "pre_quant_scale", None)
        weight = weight if scale is None else weight * scale
        if self._own is None:
            return weight
        own_rows, columns = self._own
        return weight[own_rows.start : own_rows.stop, columns.start : columns.stop].contiguous()

    def _spread(self, bias: Tensor) -> Tensor:
        return bias

    def _gather(self, dy: Tensor) -> Tensor:
        return dy.flatten(0, -2).sum(0) if dy.dim() > 1 else dy

    def _chunks(self) -> list[tuple[int, int]]:
        """Ranges of rows to dequantise at a time."""
        step = max(_CHUNK // max(self.in_features, 1) // _ROWS * _ROWS, _ROWS)
        return [(first, min(first + step, self.out_features)) for first in range(0, self.out_features, step)]

    def _push(self, x: Tensor, *tensors: Any) -> Tensor:
        products = [x @ self._rows(*chunk, *tensors).to(x.dtype).t() for chunk in self._chunks()]
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def _pull(self, dy: Tensor, shape: torch.Size, *tensors: Any) -> Tensor:
        chunks = self._chunks()
        if len(chunks) == 1:
            return dy @ self._rows(*chunks[0], *tensors).to(dy.dtype)
        total: Any = 0
        for first, last in chunks:
            rows = self._rows(first, last, *tensors).to(dy.dtype)
            total = total + (dy[..., first:last] @ rows).to(torch.float32)
        return cast(Tensor, total)
