"""PreparedLinear: what layers share whose weights were quantised and padded once, for the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from epiloq.nn.dense_rows import dense_rows
from epiloq.nn.direct_call import direct_parts
from epiloq.nn.kept_dtypes import KeptDtypes

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF_DTYPES = FLOAT_DTYPES[1:]
FLOAT32 = torch.finfo(torch.float32)

# The fast kernels move 16 bytes at a time: 16 values of a byte along K, 8 two-byte outputs along N.
K_MULTIPLE = 16
N_MULTIPLE = 8

# What quantises static activations.
_STATIC_RANGES = {"input_scale": (FLOAT32.tiny, FLOAT32.max), "input_zero_point": (-128, 127)}

# Rows and columns of a weight that share a scale in DeepSeek-V3's manner.
FP8_BLOCK = 128


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
    _check_sizes(name, linear.in_features, linear.out_features)


def _check_sizes(name: str, in_features: int, out_features: int) -> None:
    for argument, size in (("in_features", in_features), ("out_features", out_features)):
        if size < 1:
            raise ValueError(f"{name}: {argument}: expected at least 1, got {size}")


def check_choice(name: str, argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError, from the class `name`, unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: {argument}: expected one of {', '.join(choices)}, got {value!r}")


def padded(tensor: Tensor, shape: torch.Size) -> Tensor:
    """`tensor` with zeros appended along each dimension up to `shape`; itself where kernels can read it so."""
    # Tensors of a safetensors file lie in one buffer, at addresses that need not be multiples of 16.
    if tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    filled = tensor.new_zeros(shape)
    filled[tuple(map(slice, tensor.shape))] = tensor
    return filled


def _cropped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The leading `shape` of `tensor` in storage of its own; itself when there is nothing to cut."""
    if tensor.shape == shape:
        return tensor
    return tensor[tuple(map(slice, shape))].clone(memory_format=torch.contiguous_format)


class PreparedLinear(KeptDtypes):
    """A linear layer for inference, of buffers that are padded with zeros in memory and bare in the state dict.

    Only `bias` follows ``.to(dtype)``. Loading takes tensors of the state dict's shapes, floating-point ones in any
    floating-point dtype where the buffer is not of one byte, and keeps the buffers' addresses (unless assigned).
    """

    WEIGHT_DTYPE: ClassVar[torch.dtype]

    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        _check_sizes(self._class(), in_features, out_features)
        self.in_features, self.out_features = in_features, out_features
        self._shapes: dict[str, tuple[int, ...]] = {}

    def _class(self) -> str:
        return type(self).__name__

    def _hold(
        self,
        name: str,
        shape: tuple[int, ...],
        multiples: Sequence[int],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        wanted: bool = True,
    ) -> None:
        """Register a buffer of `shape` in the state dict and of its `multiples` in memory, None unless `wanted`."""
        buffer = None
        if wanted:
            self._shapes[name] = shape
            in_memory = [-(-size // multiple) * multiple for size, multiple in zip(shape, multiples, strict=True)]
            buffer = torch.zeros(in_memory, dtype=dtype, device=device)
        self.register_buffer(name, buffer)

    def _fill(self, **tensors: Tensor | None) -> None:
        """Copy tensors of the state dict's shapes, or padded ones, into the buffers of their names."""
        for name, tensor in tensors.items():
            buffer = self._buffers[name]
            if buffer is not None and tensor is not None:
                buffer[tuple(map(slice, tensor.shape))] = tensor

    def _derive(self) -> None:
        """Recompute what follows from the buffers; called after they were filled or loaded."""

    def _check_width(self, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"{self._class()}: x: expected shape [.., {self.in_features}], got {list(x.shape)}")

    def _direct(self, x: Tensor, dtypes: tuple[torch.dtype, ...], names: tuple[str, ...]) -> list[Any] | None:
        """Where one call of C++ serves: what it may write, `x`, and the buffers of these names. Of one of `dtypes`, and
        with nothing to cut off along N. Otherwise None."""
        parts = direct_parts(self, x, self.in_features, names) if x.dtype in dtypes else None
        if parts is None or parts[0].shape[0] != self.out_features:
            return None
        return [x.new_empty((*x.shape[:-1], self.out_features)), x, *parts]

    def _tokens(self, x: Tensor) -> Tensor:
        """`x` as a matrix with dense rows."""
        self._check_width(x)
        return dense_rows(x.reshape(-1, self.in_features))

    def _result(self, y: Tensor, x: Tensor) -> Tensor:
        """The product `y`, padded along N, in the form that belongs to the input `x`."""
        y = y[:, : self.out_features].contiguous().to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def weight_bytes(self) -> int:
        """Bytes that stand for the float weight in memory: values with padding, scales, what is derived from them."""
        not_weight = ("bias", "input_scale", "input_zero_point")
        return sum(t.nbytes for name, t in self._buffers.items() if t is not None and name not in not_weight)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, shape in self._shapes.items():
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
        for name, shape in self._shapes.items():
            given, buffer = state_dict.get(prefix + name), self.get_buffer(name)
            if given is None:
                continue
            if given.shape != shape or not _same_kind(given.dtype, buffer.dtype):
                error_msgs.append(
                    f"{self._class()}: {prefix}{name}: expected {buffer.dtype} {list(shape)}, "
                    f"got {given.dtype} {list(given.shape)}"
                )
                return
            if name in _STATIC_RANGES and not given.is_meta:
                low, high = _STATIC_RANGES[name]
                if not low <= (value := given.item()) <= high:
                    error_msgs.append(f"{self._class()}: {prefix}{name}: expected {low:g} to {high:g}, got {value}")
                    return
            kept = given if name == "bias" else given.to(buffer.dtype)
            state_dict[prefix + name] = padded(kept, buffer.shape)  # load_state_dict's own copy of the dict.
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._derive()

    def __getstate__(self) -> dict[str, Any]:
        # The pickle module, unlike torch.save, has no way for float8 (torch 2.13): its bytes go instead.
        return self.__dict__ | {"_buffers": self._buffers | {"weight": self.weight.view(torch.uint8)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight = self.weight.view(self.WEIGHT_DTYPE)


def _same_kind(given: torch.dtype, held: torch.dtype) -> bool:
    """Whether a tensor may be loaded: weights of a byte as they are, other floating-point values in any such dtype."""
    return given == held or (given.is_floating_point and held.is_floating_point and held.itemsize > 1)


def number(
    where: str, value: float | Tensor | None, wanted: bool, kinds: tuple[type[float], ...], low: float, high: float
) -> float:
    """`value` as a number from `low` to `high`, or 0 where this kind of activation has no such parameter."""
    if value is None and not wanted:
        return 0
    found: float | Tensor | None = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not wanted or not isinstance(found, kinds) or not low <= found <= high:
        expected = f"{kinds[-1].__name__} from {low:g} to {high:g}" if wanted else "None with this kind of activation"
        raise ValueError(f"{where}: expected {expected}, got {value!r}")
    return found
