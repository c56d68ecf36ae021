"""Int8Linear: a linear layer with int8 weights and int8 activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import epiloq

ACTIVATIONS = ("dynamic", "static")
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT32 = torch.finfo(torch.float32)

# The fast kernels move 16 bytes at a time: 16 int8 along K, 8 two-byte outputs along N.
K_MULTIPLE = 16
N_MULTIPLE = 8


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def max_in_features(symmetric: bool) -> int:
    """Largest K, padded, with exact int32 sums: both factors are at most 128, but |q - azp| is at most 255."""
    largest_product = 128 * (128 if symmetric else 255)
    return (2**31 - 1) // largest_product // K_MULTIPLE * K_MULTIPLE


def check_linear(name: str, linear: nn.Module) -> None:
    """Raise ValueError, from the class `name`, unless `linear` is a float ``nn.Linear`` that is called."""
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"{name}: linear: expected a torch.nn.Linear, got {type(linear).__name__}")
    if isinstance(linear, NonDynamicallyQuantizableLinear):
        raise ValueError(f"{name}: linear: expected a layer that is called, but MultiheadAttention reads its weight")
    if isinstance(linear.weight, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name}: linear: its lazy weight has no shape yet; run the model once before quantising it")
    if linear.weight.dtype not in FLOAT_DTYPES:
        expected = ", ".join(map(str, FLOAT_DTYPES))
        raise ValueError(f"{name}: linear.weight: expected one of {expected}, got {linear.weight.dtype}")


def _check_in_features(in_features: int, symmetric: bool) -> None:
    if not 1 <= in_features <= max_in_features(symmetric):
        kind = "symmetric" if symmetric else "asymmetric"
        raise ValueError(
            f"Int8Linear: in_features: expected 1 to {max_in_features(symmetric)} (the exact range of int32 sums "
            f"with {kind} activations), got {in_features}"
        )


def _padded(tensor: Tensor, shape: torch.Size) -> Tensor:
    """`tensor` with zeros appended along each dimension up to `shape`; itself where kernels can read it so."""
    # Tensors of a safetensors file lie in one buffer, at addresses that need not be multiples of 16.
    if tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    padded = tensor.new_zeros(shape)
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded


def _cropped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The leading `shape` of `tensor` in storage of its own; itself when there is nothing to cut."""
    if tensor.shape == shape:
        return tensor
    return tensor[tuple(map(slice, shape))].clone(memory_format=torch.contiguous_format)


class Int8Linear(nn.Module):
    """``y = x W^T + bias`` with int8 W (one scale an output channel, symmetric) and x quantised to int8 on the way in.

    For inference. `x` is ``[.., in_features]`` (any rank from 1) in float32, float16 or bfloat16, and `y` is
    contiguous ``[.., out_features]`` in the dtype of `x`. The accumulation is exact in int32 and the epilogue is in
    float32. CUDA kernels write 16-bit outputs only: float32 `x` on CUDA is computed with a bfloat16 output, then
    widened.

    activation, symmetric
        ``"dynamic"``: a scale (and, unless `symmetric`, a zero point) for each token, see ``epiloq.quantize_int8``.
        ``"static"``: one scale (and zero point) for all tokens, held in `input_scale` (and `input_zero_point`).

    Buffers, as the state dict holds them (N = out_features, K = in_features):
        weight            int8 [N, K], scale * q with q = round-half-even(W / scale)
        weight_scale      float32 [N] = max(max_k |W[n, k]| / 127, 2^-126)
        bias              [N], of the layer's float dtype; the only one that ``.to(dtype)`` converts
        input_scale       float32 [1], static only
        input_zero_point  int32 [1] in [-128, 127], static and asymmetric only
    In memory `weight` is ``[N rounded up to 8, K rounded up to 16]`` with zeros around (the per-channel vectors
    alike), so that every size runs on the fast kernels; an out_features that is not a multiple of 8 costs one copy
    of `y`. `azp_adj`, int32 [N padded], the zero point's correction, is derived: the sums of the weight's rows,
    multiplied by `input_zero_point` when static. Load these tensors with ``load_state_dict`` rather than assigning
    to them, for that keeps `azp_adj` in step.

    Raises ValueError for an `in_features` whose int32 sums could overflow (131056 symmetric, 65792 asymmetric, at
    most).
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    azp_adj: Tensor | None
    input_scale: Tensor | None
    input_zero_point: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "dynamic",
        symmetric: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"Int8Linear: activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if out_features < 1:
            raise ValueError(f"Int8Linear: out_features: expected at least 1, got {out_features}")
        _check_in_features(in_features, symmetric)
        self.in_features, self.out_features = in_features, out_features
        self.activation, self.symmetric = activation, symmetric

        def zeros(*shape: int, dtype: torch.dtype | None) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        n, k = _round_up(out_features, N_MULTIPLE), _round_up(in_features, K_MULTIPLE)
        static = activation == "static"
        self.register_buffer("weight", zeros(n, k, dtype=torch.int8))
        self.register_buffer("weight_scale", zeros(n, dtype=torch.float32))
        self.register_buffer("bias", zeros(n, dtype=dtype) if bias else None)
        self.register_buffer("input_scale", torch.ones(1, device=device) if static else None)
        self.register_buffer("input_zero_point", zeros(1, dtype=torch.int32) if static and not symmetric else None)
        self.register_buffer("azp_adj", None if symmetric else zeros(n, dtype=torch.int32), persistent=False)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        activation: str = "dynamic",
        symmetric: bool = True,
        input_scale: float | Tensor | None = None,
        input_zero_point: int | Tensor | None = None,
    ) -> Int8Linear:
        """Quantise `linear` (left as it is) to the nearest int8 weights, on its device; "meta" gives "meta".

        `input_scale` (finite, at least 2^-126) belongs to static activations, `input_zero_point` (-128 to 127) to
        static asymmetric ones: x is about ``input_scale * (q - input_zero_point)``. An output channel with a NaN or
        an infinity in its weights gives NaN.

        Raises ValueError for what is not a float32, float16 or bfloat16 ``nn.Linear`` and for input parameters that
        are missing, out of range or not of the chosen kind.
        """
        cls.check_convertible(linear, activation=activation, symmetric=symmetric)
        weight, static = linear.weight, activation == "static"
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            activation=activation,
            symmetric=symmetric,
            device=weight.device,
            dtype=weight.dtype,
        ).train(linear.training)
        scale = _number("input_scale", input_scale, static, (int, float), FLOAT32.tiny, FLOAT32.max)
        zero_point = _number("input_zero_point", input_zero_point, static and not symmetric, (int,), -128, 127)
        if weight.is_meta:
            return layer
        q, weight_scale, _ = epiloq.quantize_int8(weight.contiguous(), pad_to=K_MULTIPLE)
        layer.weight = _padded(q, layer.weight.shape)
        layer.weight_scale[: layer.out_features] = weight_scale.flatten()
        if layer.bias is not None:
            layer.bias[: layer.out_features] = linear.bias
        if layer.input_scale is not None:
            layer.input_scale.fill_(scale)
        if layer.input_zero_point is not None:
            layer.input_zero_point.fill_(zero_point)
        layer._derive()
        return layer

    @staticmethod
    def check_convertible(linear: nn.Module, *, activation: str = "dynamic", symmetric: bool = True) -> None:
        """Raise ValueError unless ``from_linear`` can take `linear` as it is."""
        check_linear("Int8Linear", linear)
        _check_in_features(cast(nn.Linear, linear).in_features, symmetric)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"Int8Linear: x: expected shape [.., {self.in_features}], got {list(x.shape)}")
        out_dtype = torch.bfloat16 if x.is_cuda and x.dtype == torch.float32 else x.dtype
        tokens = x.reshape(-1, self.in_features)
        q, scale, azp = epiloq.quantize_int8(
            tokens if tokens.stride(1) == 1 else tokens.contiguous(),
            scale=self.input_scale,
            azp=self.input_zero_point,
            symmetric=self.symmetric,
            pad_to=K_MULTIPLE,
        )
        weight = self.weight.t()
        bias = None if self.bias is None else self.bias.to(out_dtype)
        if self.azp_adj is None:
            y = epiloq.scaled_mm(q, weight, scale, self.weight_scale, bias, out_dtype=out_dtype)
        else:
            # A static zero point is already a factor of azp_adj.
            token_azp = azp if self.activation == "dynamic" else None
            y = epiloq.scaled_mm_azp(
                q, weight, scale, self.weight_scale, self.azp_adj, token_azp, bias, out_dtype=out_dtype
            )
        y = y[:, : self.out_features].contiguous().to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def weight_bytes(self) -> int:
        """Bytes that stand for the float weight in memory: int8 values with padding, scales, zero-point sums."""
        return sum(t.nbytes for t in (self.weight, self.weight_scale, self.azp_adj) if t is not None)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activation={self.activation}, symmetric={self.symmetric}"
        )

    def _derive(self) -> None:
        """Recompute azp_adj: in place, for captured CUDA graphs keep its address, unless its device changes."""
        if self.azp_adj is None:
            return
        sums = self.weight.sum(dim=1, dtype=torch.int32)
        if self.input_zero_point is not None:
            if self.input_zero_point.device != self.weight.device:
                return  # Loading from "meta" piece by piece: the other piece is still to come.
            sums *= self.input_zero_point
        if self.azp_adj.device == sums.device:
            self.azp_adj.copy_(sums)
        else:
            self.azp_adj = sums

    def _stored(self) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
        """The buffers of the state dict, by name, each with the shape that it has there."""
        shapes = {"weight": (self.out_features, self.in_features), "input_scale": (1,), "input_zero_point": (1,)}
        names = ("weight", "weight_scale", "bias", "input_scale", "input_zero_point")
        buffers = ((name, self._buffers[name]) for name in names)
        return {name: (t, shapes.get(name, (self.out_features,))) for name, t in buffers if t is not None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, (_, shape) in self._stored().items():
            destination[prefix + name] = _cropped(destination[prefix + name], shape)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, (buffer, shape) in self._stored().items():
            given = state_dict.get(prefix + name)
            if given is None:
                continue
            same_kind = given.dtype == buffer.dtype or (given.is_floating_point() and buffer.is_floating_point())
            if given.shape != shape or not same_kind:
                error_msgs.append(
                    f"Int8Linear: {prefix}{name}: expected {buffer.dtype} {list(shape)}, "
                    f"got {given.dtype} {list(given.shape)}"
                )
                return
            kept = given if name == "bias" else given.to(buffer.dtype)
            state_dict[prefix + name] = _padded(kept, buffer.shape)  # load_state_dict's own copy of the dict.
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._derive()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and name != "bias" and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


def _number(
    name: str, value: float | Tensor | None, wanted: bool, kinds: tuple[type[float], ...], low: float, high: float
) -> float:
    """`value` as a number from `low` to `high`, or 0 where this kind of activation has no such parameter."""
    if value is None and not wanted:
        return 0
    number: float | Tensor | None = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not wanted or not isinstance(number, kinds) or not low <= number <= high:
        expected = f"{kinds[-1].__name__} from {low:g} to {high:g}" if wanted else "None with this kind of activation"
        raise ValueError(f"Int8Linear: {name}: expected {expected}, got {value!r}")
    return number
