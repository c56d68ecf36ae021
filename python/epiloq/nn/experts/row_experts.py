"""Experts: base class of the layers of a mixture of experts, and the classes with scales per token and channel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

import epiloq
from epiloq.nn.base.dense_rows import dense_rows
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES, K_MULTIPLE, N_MULTIPLE, PreparedLinear, as_stored
from epiloq.nn.base.quantized_layer import check_positive, convert_input
from epiloq.nn.base.w4a8_layer import ACTIVATIONS, quantised_tokens

_Layer = TypeVar("_Layer", bound="Experts")


class ExpertRows(NamedTuple):
    """The rows of each expert: exactly one of `offs` and `masked_m` of ``epiloq.grouped_mm``."""

    offs: Tensor | None = None
    masked_m: Tensor | None = None


class Experts(PreparedLinear):
    """``y[i] = x[i] W[e]^T`` for the expert e of each row i, without bias. Abstract base class.

    There are two forms, as in ``epiloq.grouped_mm``: `x` ``[M, in_features]`` sorted by expert with `offs`, int32
    ``[E]``, the ends of the experts' rows; or `x` ``[E, M, in_features]`` with `masked_m`, int32 ``[E]``, the number
    of valid rows of each expert. On a GPU neither is read back to the host. `y` is contiguous, in the dtype of `x`
    (float32, float16 or bfloat16), and undefined in rows that belong to no expert.
    """

    SCALE: ClassVar[str]
    """Name of the parameter with the weights' scales."""
    ROWS_PER_SCALE: ClassVar[int]
    """Number of consecutive output features that share a scale."""
    IN_PANELS: ClassVar[bool] = False
    """Whether neighbouring output features share bytes, so that loaded tensors may include padding."""

    def __init__(
        self, experts: int, in_features: int, out_features: int, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__(in_features, out_features)
        check_positive(self._class(), experts=experts)
        self.experts = experts
        self._hold_weight(device)
        self._hold_scales(device)
        self._store("bias", None)

    def _hold_weight(self, device: torch.device | str | None) -> None:
        """Store the quantised values."""
        shape = (self.experts, self.out_features, self.in_features)
        self._hold("weight_q", shape, (1, N_MULTIPLE, K_MULTIPLE), self.WEIGHT_DTYPE, device)

    @classmethod
    @torch.no_grad()
    def from_weight(cls: type[_Layer], weight: Tensor, **options: Any) -> _Layer:
        """Quantise float weights ``[E, N, K]`` (which are not changed) to the nearest values, on their device.

        `options` are those of the constructor. Raises ValueError unless the weights are float32, float16 or bfloat16
        with three dimensions.
        """
        if weight.dim() != 3 or weight.dtype not in FLOAT_DTYPES:
            expected = ", ".join(map(str, FLOAT_DTYPES))
            raise ValueError(
                f"{cls.__name__}: weight: expected [E, N, K] of {expected}, got {list(weight.shape)} of {weight.dtype}"
            )
        experts, n, k = weight.shape
        layer = cls(experts, k, n, device=weight.device, **options)
        if not weight.is_meta:
            for expert, values in enumerate(weight):
                layer._fill_expert(expert, values.contiguous())
            layer._settle()
        return layer

    @abstractmethod
    def _hold_scales(self, device: torch.device | str | None) -> None:
        """Store the scales."""

    @abstractmethod
    def _fill_expert(self, expert: int, values: Tensor) -> None:
        """Quantise one expert's float ``[N, K]`` into the parameters."""

    @property
    def quantize_options(self) -> Mapping[str, Any]:
        """Options with which `gather_expert_rows` and `silu_and_mul_quant` quantise its rows; empty: they cannot."""
        return {}

    @property
    def held_parts(self) -> tuple[str, ...]:
        """Names of the weight's parameters that are present."""
        return tuple(name for name in self.PARTS if self._parameters[name] is not None)

    def places(self, expert: int, begin: int, rows: int) -> dict[str, Tensor]:
        """Views of an expert's rows from `begin` (a multiple of ROWS_PER_SCALE) on, by parameter."""
        shared = self.ROWS_PER_SCALE
        scales = slice(begin // shared, begin // shared - (-rows // shared))
        return {
            "weight_q": self.weight_q[expert, begin : begin + rows],
            self.SCALE: self.get_parameter(self.SCALE)[expert, scales],
        }

    def as_in_files(self, parts: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """The tensors of a linear layer with `rows` rows, taken from `places`, in the files' form."""
        return {**parts, "weight_q": parts["weight_q"].view(self.WEIGHT_DTYPE)}

    def fitting(self, name: str, given: Tensor, held: Tensor, rows: int) -> Tensor | str:
        """Convert a tensor of a linear layer with `rows` rows, in either form, to the stored form; or return what was
        expected."""
        exact = name == "weight_q" or self.IN_PANELS
        kind = self.WEIGHT_DTYPE if name == "weight_q" else held.dtype
        if given.shape != held.shape or (exact and given.dtype not in (kind, held.dtype)):
            return f"expected {kind} {list(held.shape)}, got {given.dtype} {list(given.shape)}"
        return as_stored(given, held.dtype)

    def clear(self, begin: int, end: int) -> None:
        """Zero the padding rows of every expert."""
        self.weight_q[:, begin:end] = 0
        scales = slice(-(-begin // self.ROWS_PER_SCALE), end // self.ROWS_PER_SCALE)
        self.get_parameter(self.SCALE)[:, scales] = 0

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows ``[…, R, K]`` in WEIGHT_DTYPE, padded, and their scales, each row by itself. Experts that multiply
        floating-point rows return these, without scales."""
        return x, None

    @abstractmethod
    def multiply(self, q: Tensor, scale: Tensor | None, out_dtype: torch.dtype, rows: ExpertRows) -> Tensor:
        """Multiply quantised rows: ``[…, R, N']``, padded like the weight."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``[experts, out_features, in_features]``."""
        return self.experts, self.out_features, self.in_features

    def forward(self, x: Tensor, *, offs: Tensor | None = None, masked_m: Tensor | None = None) -> Tensor:
        if is_symbolic(x):
            return as_leaf(self, x, offs=offs, masked_m=masked_m)
        x = convert_input(self, x)
        self._check_width(x)
        return self._call(x, (*self._made, offs, masked_m))

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        *_, offs, masked_m = tensors
        q, scale = self.quantise(dense_rows(x))
        y = self.multiply(q, scale, x.dtype, ExpertRows(offs, masked_m))
        return y[..., : self.out_features].contiguous()

    def dequantized_weight(self) -> Tensor:
        made = [self._of_expert(self._made, expert) for expert in range(self.experts)]
        return torch.stack([self._rows(0, self.out_features, *parts) for parts in made])

    @abstractmethod
    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        """Dequantised rows of one expert's weight, whose codes and scales are the `tensors`."""

    def _of_expert(self, parts: Sequence[Tensor | None], expert: int) -> list[Tensor | None]:
        """The tensors of one expert that kernels read."""
        return [None if part is None else part[expert] for part in parts]

    def _push(self, x: Tensor, *tensors: Any) -> Tensor:
        return self._by_expert(lambda rows, weight: rows @ weight.t(), self.out_features, x, *tensors)

    def _pull(self, dy: Tensor, shape: torch.Size, *tensors: Any) -> Tensor:
        return self._by_expert(torch.matmul, self.in_features, dy, *tensors)

    def _by_expert(self, product: Callable[[Tensor, Tensor], Tensor], width: int, x: Tensor, *tensors: Any) -> Tensor:
        """Product of each row with its expert's weight, one expert at a time; 0 for rows without an expert.

        `offs` is read on the host; in a compiled graph, every expert multiplies all rows instead.
        """
        *parts_of_all, offs, masked_m = tensors

        def of(expert: int, rows: Tensor) -> Tensor:
            dense = self._rows(0, self.out_features, *self._of_expert(parts_of_all, expert))
            return product(rows, dense.to(rows.dtype))

        place = torch.arange(x.shape[-2], device=x.device)
        if masked_m is not None:
            each = torch.stack([of(expert, x[expert]) for expert in range(self.experts)])
            return torch.where((place < masked_m[:, None])[..., None], each, 0)
        begins = torch.nn.functional.pad(offs[:-1], (1, 0))
        if torch.compiler.is_dynamo_compiling():
            total = x.new_zeros((*x.shape[:-1], width))
            for expert in range(self.experts):
                own = (place >= begins[expert]) & (place < offs[expert])
                total = torch.where(own[:, None], of(expert, x), total)
            return total
        ends = [0, *offs.tolist()]
        parts = [of(e, x[ends[e] : ends[e + 1]]) for e in range(self.experts) if ends[e] < ends[e + 1]]
        return torch.cat([*parts, x.new_zeros((x.shape[0] - ends[-1], width))])

    def extra_repr(self) -> str:
        return f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"


class TokenQuantizedExperts(Experts):
    """`Experts` whose activations are quantised with a dynamic scale per token. Base class."""

    activation: str
    """Kind of quantised activations, a name in `ACTIVATIONS`."""

    @property
    def quantize_options(self) -> Mapping[str, Any]:
        return {"dtype": ACTIVATIONS[self.activation]}

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantised_tokens(x, self.activation)


class RowExperts(TokenQuantizedExperts):
    """`TokenQuantizedExperts` with a scale per output feature of each expert. Base class."""

    SCALE, ROWS_PER_SCALE = "weight_scale", 1
    PARTS = ("weight_q", "weight_scale")

    weight_scale: Tensor

    def _hold_scales(self, device: torch.device | str | None) -> None:
        shape = (self.experts, self.out_features)
        self._hold("weight_scale", shape, (1, N_MULTIPLE), torch.float32, device)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        weight, scale = tensors
        rows: Tensor = weight[first:last, : self.in_features].to(torch.float32) * scale[first:last, None]
        return rows

    def _fill_expert(self, expert: int, values: Tensor) -> None:
        q, scale = self.quantise(values)
        self.weight_q[expert] = as_stored(q[:, : self.in_features], self.weight_q.dtype)
        self.weight_scale[expert] = scale.flatten()

    def multiply(self, q: Tensor, scale: Tensor | None, out_dtype: torch.dtype, rows: ExpertRows) -> Tensor:
        weight_q, weight_scale = self._made
        assert scale is not None
        return epiloq.grouped_mm(
            q,
            weight_q.mT,
            scale,
            weight_scale.unsqueeze(1),
            offs=rows.offs,
            masked_m=rows.masked_m,
            recipe=(1, 1, -1),
            out_dtype=out_dtype,
        )


class Int8Experts(RowExperts):
    __doc__ = f"""{Experts.__doc__}
    Weights are int8 with a scale per channel, activations int8 with a dynamic symmetric scale per token, as in
    `Int8Linear`. At most 131056 in_features are supported, for which int32 sums are exact.

    Parameters without gradients, which form the state dict (E = experts, N = out_features, K = in_features):
        weight_q      int8 [E, N, K], W / scale rounded to nearest, ties to even
        weight_scale  float32 [E, N], max|W| / 127 of the channel, at least 2^-126
    Kernels need N padded to a multiple of 8 and K to one of 16; for other sizes they read padded copies.
    """

    WEIGHT_DTYPE, activation = torch.int8, "int8"


class Fp8Experts(RowExperts):
    __doc__ = f"""{Experts.__doc__}
    Weights are float8_e4m3fn with a scale per channel, activations float8_e4m3fn with a dynamic scale per token, as in
    `Fp8Linear`.

    Parameters without gradients, which form the state dict (E = experts, N = out_features, K = in_features):
        weight_q      uint8 [E, N, K], the bytes of float8_e4m3fn values, W / scale rounded to nearest
        weight_scale  float32 [E, N], max|W| / 448 of the channel, at least 2^-126
    Kernels need N padded to a multiple of 8 and K to one of 16; for other sizes they read padded copies.
    """

    WEIGHT_DTYPE, activation = torch.float8_e4m3fn, "fp8"
