"""PreparedLinear: base class of layers whose weights are quantised and padded once for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from epiloq._torch.calls import PLAIN, is_transformed
from epiloq.nn.base.dense_rows import dense_rows
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.quantized_layer import FILES_SAY_WEIGHT, check_positive, convert_input
from epiloq.weights.computed import FLOAT_DTYPES as FLOAT_DTYPES

HALF_DTYPES = FLOAT_DTYPES[1:]
FLOAT32 = torch.finfo(torch.float32)

# Vectorised kernels access 16 bytes: 16 one-byte values along K, 8 two-byte outputs along N.
K_MULTIPLE = 16
N_MULTIPLE = 8

# Parameters of static activation quantisation, and their ranges.
_STATIC_RANGES = {"input_scale": (FLOAT32.tiny, FLOAT32.max), "input_zero_point": (-128, 127)}

# Rows and columns of a weight that share a scale in DeepSeek-V3's format.
FP8_BLOCK = 128


def check_choice(name: str, argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError, on behalf of the class `name`, unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: {argument}: expected one of {', '.join(choices)}, got {value!r}")


def kernel_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels write a product of `x` whose result is of `dtype`: on CUDA none writes float32."""
    return torch.bfloat16 if x.is_cuda and dtype not in HALF_DTYPES else dtype


def padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`tensor` padded with zeros to `shape`; unchanged if kernels can read it directly."""
    # Under a transform, such as vmap, the operation receives copies of the tensors, which are aligned.
    aligned = is_compiling() or is_transformed() or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)
    if tensor.shape == shape and aligned:
        return tensor
    # float8 is copied as bytes, because some backends cannot copy it.
    values = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    filled = values.new_zeros(shape)
    filled[tuple(map(slice, tensor.shape))].copy_(values)
    return filled.view(tensor.dtype)


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit values viewed as the bytes that a layer stores; others unchanged."""
    return values.view(dtype) if values.dtype != dtype and values.dtype.itemsize == dtype.itemsize == 1 else values


class PreparedLinear(FrozenLinear):
    """A linear layer for inference, whose tensors kernels read padded with zeros.

    Stored tensors have the sizes of the layer. For sizes that kernels do not support, padded copies are made. Only
    `bias` follows ``.to(dtype)``. Loading accepts floating-point tensors in any floating-point dtype unless the
    layer's dtype has one byte, and keeps the parameters' addresses (unless assigned).
    """

    RENAMED = FILES_SAY_WEIGHT
    WEIGHT_DTYPE: ClassVar[torch.dtype]
    """The dtype of the quantised values; float8 is stored as bytes, which torch can broadcast, gather and pickle."""
    PARTS: ClassVar[tuple[str, ...]]
    """Names of the kernels' tensors in order, the weight first, then the bias."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(dtype)
        check_positive(self._class(), in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self._stored_shapes: dict[str, tuple[int, ...]] = {}
        self._padded_shapes: dict[str, tuple[int, ...]] = {}

    def _class(self) -> str:
        return type(self).__name__

    @property
    def padded_in_features(self) -> int:
        """Input features including the padding that kernels read."""
        return self._padded_shapes["weight_q"][-1]

    def _hold(
        self,
        name: str,
        shape: tuple[int, ...],
        multiples: Sequence[int],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        wanted: bool = True,
    ) -> None:
        """Register a tensor of `shape` that kernels read padded to `multiples`; None unless `wanted`."""
        if dtype is not None and dtype.is_floating_point and dtype.itemsize == 1:
            dtype = torch.uint8
        self._stored_shapes[name] = shape
        padding = zip(shape, multiples, strict=True)
        self._padded_shapes[name] = tuple(-(-size // multiple) * multiple for size, multiple in padding)
        self._store(name, torch.zeros(shape, dtype=dtype, device=device) if wanted else None)

    @torch.no_grad()
    def _fill(self, **tensors: Tensor | None) -> None:
        """Copy tensors, which may be padded, into the parameters with these names."""
        for name, tensor in tensors.items():
            held = self._parameters[name]
            if held is not None and tensor is not None:
                held.copy_(as_stored(tensor, held.dtype)[tuple(map(slice, held.shape))])
        self._settle()

    def _make(self) -> Any:
        return tuple(self._padded(name) for name in self.PARTS)

    @property
    def _values(self) -> Tensor:
        """`weight_q` in the dtype that its bytes encode."""
        stored = self._stored("weight_q")
        assert stored is not None
        return stored if stored.dtype == self.WEIGHT_DTYPE else stored.view(self.WEIGHT_DTYPE)

    def file_state(self) -> dict[str, Tensor]:
        return super().file_state() | {"weight": self._values.detach()}

    def _padded(self, name: str) -> Tensor | None:
        stored = self._values if name == "weight_q" else self._stored(name)
        if stored is None:
            return None
        if stored.shape != self._stored_shapes[name]:  # it would be padded to a size that kernels accept
            shape = list(self._stored_shapes[name])
            raise ValueError(f"{self._class()}: {name}: expected shape {shape}, got {list(stored.shape)}")
        return padded(stored, self._padded_shapes[name])

    def forward(self, input: Tensor) -> Tensor:
        if is_symbolic(input):
            return as_leaf(self, input)
        x = convert_input(self, input)
        self._check_width(x)
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{self._class()}: x: expected one of {', '.join(map(str, FLOAT_DTYPES))}, got {x.dtype}")
        return self._call(x, self._made)

    def _tokens(self, x: Tensor) -> Tensor:
        """`x` as a matrix with contiguous rows."""
        self._check_width(x)
        return dense_rows(x.reshape(-1, self.in_features))

    def _result(self, y: Tensor, x: Tensor) -> Tensor:
        """The product `y`, which is padded along N, in the shape that corresponds to the input `x`."""
        y = y[:, : self.out_features].contiguous().to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def _parts(self) -> Sequence[Any]:
        return cast(Sequence[Any], self._made)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        weight_q, _, weight_scale, *_ = tensors
        scale = weight_scale if weight_scale.numel() == 1 else weight_scale[first:last, None]
        rows: Tensor = weight_q[first:last, : self.in_features].to(torch.float32) * scale
        return rows

    @property
    def weight_bytes(self) -> int:
        """Size of the quantised weight in memory, in bytes: values, scales, and copies for the kernels."""
        not_weight = ("bias", "input_scale", "input_zero_point")
        tensors = [t for name, t in self._parameters.items() if name not in not_weight]
        tensors += [t for name, t in zip(self.PARTS, self._made, strict=True) if name not in not_weight]
        memory = {t.untyped_storage()._cdata: t.nbytes for t in tensors if t is not None}
        return sum(memory.values())

    def _fitting(self, name: str, given: Tensor, held: Tensor) -> Tensor | str:
        if name in _STATIC_RANGES and type(given) in PLAIN and not given.is_meta and given.shape == held.shape:
            low, high = _STATIC_RANGES[name]
            if not low <= (value := given.item()) <= high:
                return f"expected {low:g} to {high:g}, got {value}"
        if name == "weight_q" and given.shape == held.shape:
            given = as_stored(given, held.dtype) if given.dtype == self.WEIGHT_DTYPE else given
            if given.dtype != held.dtype:
                return f"expected {self.WEIGHT_DTYPE} {list(held.shape)}, got {given.dtype} {list(given.shape)}"
        return super()._fitting(name, given, held)


def number(
    where: str, value: float | Tensor | None, wanted: bool, kinds: tuple[type[float], ...], low: float, high: float
) -> float:
    """`value` as a number from `low` to `high`, or 0 if this kind of activation has no such parameter."""
    if value is None and not wanted:
        return 0
    found: float | Tensor | None = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not wanted or not isinstance(found, kinds) or not low <= found <= high:
        expected = f"{kinds[-1].__name__} from {low:g} to {high:g}" if wanted else "None with this kind of activation"
        raise ValueError(f"{where}: expected {expected}, got {value!r}")
    return found
