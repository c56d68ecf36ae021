"""Problems that can be tuned: matrix products of layers, models or plain shapes, by their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from epiloq import _core
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Int8Linear, OnlineQuantLinear, W4A8Linear, WeightOnlyLinear
from epiloq.nn.base.packed_linear import PackedLinear
from epiloq.ops.w4a8 import unpacked
from epiloq.ops.w4a8_mm import float8_tokens
from epiloq.schemes import SCHEMES

Options: TypeAlias = tuple[tuple[str, Any], ...]
DTYPE = torch.bfloat16
"""Dtype of activations for layers that do not determine it."""
DEFAULT_SCHEMES = ("w8a8-int8", "fp8-token", "fp8-block", "w4a16-g128")
_CANDIDATES: Mapping[str, Callable[..., tuple[str, str, list[tuple[str, float]]]]] = {
    "scaled_mm": _core.candidates_scaled_mm,
    "groupwise_mm": _core.candidates_groupwise_mm,
    "online_quant_mm": _core.candidates_online_quant_mm,
    "w4a8_mm": _core.candidates_w4a8_mm,
    "weight_only_mm": _core.candidates_weight_only_mm,
}


@dataclass(frozen=True)
class Problem:
    """A product ``[M, K] x [N, K]^T`` of an operation, and the other properties that determine its kernel."""

    operation: str
    m: int
    n: int
    k: int
    options: Options = ()

    def candidates(self, device: int) -> Candidates:
        """Its kernels on a CUDA device, given by index, or (-1) on the first GPU of the forced architecture."""
        key, chosen, found = _CANDIDATES[self.operation](device, self.m, self.n, self.k, **dict(self.options))
        return Candidates(key, chosen, dict(found))

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.operation} M={self.m} N={self.n} K={self.k}{options}"


@dataclass(frozen=True)
class Candidates:
    """`key` identifies the problems that share a choice, `chosen` is the default, and `expected_us` the cost model's
    estimate for each candidate, 0 if it has none."""

    key: str
    chosen: str
    expected_us: dict[str, float]


@dataclass(frozen=True)
class _Product:
    """A layer's product for any number of tokens."""

    operation: str
    n: int
    k: int
    options: Options = ()
    tokens: range = range(1, 1 << 31)  # numbers of tokens for which it is used

    def of(self, m: int) -> Problem:
        return Problem(self.operation, m, self.n, self.k, self.options)


def _padded(layer: Int8Linear | Fp8Linear | Fp8BlockLinear) -> tuple[int, int]:
    """The padded sizes that kernels see."""
    n, k = layer._padded_shapes["weight_q"]
    return n, k


def _dtype_name(layer: PackedLinear) -> str:
    dtype = layer.weight_scale.dtype
    return str(DTYPE if dtype == torch.float32 else dtype).removeprefix("torch.")


def _weight_only(layer: PackedLinear, dtype: str) -> _Product:
    scale = layer.weight_scale.dtype
    options: dict[str, Any] = {
        "bits": layer.bits,
        "group_size": layer.group_size,
        "dtype": dtype,
        "scale_bytes": scale.itemsize,
        "zeros": layer.weight_zero is not None,
        "offsets": layer.weight_offset is not None,
        "same_type": str(scale) == f"torch.{dtype}",
    }
    return _Product("weight_only_mm", layer.out_features, layer.in_features, tuple(options.items()))


def _w4a8(layer: W4A8Linear) -> Iterator[_Product]:
    """Products with few tokens run in 16 bits, others in float8 if there is a kernel that is faster, and many with the
    weight unpacked to 8 bits."""
    few, sizes = _weight_only(layer, "bfloat16"), (layer.out_features, layer.in_features)
    is_float8 = layer.activation == "fp8"
    many = None
    if unpacked.has_whole_rows(layer.group_size, layer.in_features):
        many = _Product("scaled_mm", *sizes, (("dtype", "float8_e4m3fn" if is_float8 else "int8"),))
    elif is_float8 and unpacked.keeps_groups(layer.group_size):
        many = _Product("groupwise_mm", *sizes, (("column_scales", True), ("whole_row_scales", True)))
    last = 1 << 31
    from_memory = unpacked.MANY_TOKENS if many and layer.in_features % unpacked.ALIGNED == 0 else last
    in_registers = range(from_memory, from_memory)
    if is_float8 and layer.weight_zero is None:
        kernel = float8_tokens(layer.group_size)
        in_registers = range(kernel.start, min(kernel.stop, from_memory))
    yield replace(few, tokens=range(1, in_registers.start))
    if in_registers:
        yield _Product("w4a8_mm", *sizes, (("group_size", layer.group_size),), in_registers)
    if in_registers.stop < from_memory:
        yield replace(few, tokens=range(in_registers.stop, from_memory))
    if many is not None:
        yield replace(many, tokens=range(from_memory, last))


def _products_of(layer: nn.Module) -> Iterator[_Product]:
    if isinstance(layer, Int8Linear):
        yield _Product("scaled_mm", *_padded(layer), (("dtype", "int8"),))
    elif isinstance(layer, Fp8Linear):
        yield _Product("scaled_mm", *_padded(layer), (("dtype", "float8_e4m3fn"),))
    elif isinstance(layer, Fp8BlockLinear):
        yield _Product("groupwise_mm", *_padded(layer), (("column_scales", layer.rows == 1),))
    elif isinstance(layer, OnlineQuantLinear):
        options = (("bits", layer.bits), ("group_size", layer.group_size))
        yield _Product("online_quant_mm", layer.out_features, layer.in_features, options)
    elif isinstance(layer, W4A8Linear):
        yield from _w4a8(layer)
    elif isinstance(layer, WeightOnlyLinear) and layer.bits in (4, 8):
        yield _weight_only(layer, _dtype_name(layer))


def _layers_of(what: Any, schemes: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the quantised layers of a model or, if it has none, those that its linear layers become by each scheme."""
    if isinstance(what, nn.Module):
        own = [layer for layer in what.modules() if any(_products_of(layer))]
        shapes = {(layer.out_features, layer.in_features) for layer in what.modules() if isinstance(layer, nn.Linear)}
        yield from own or _layers_of(sorted(shapes), schemes)
    elif isinstance(what, tuple) and len(what) == 2 and all(type(size) is int for size in what):
        n, k = cast(tuple[int, int], what)
        if min(n, k) < 1:
            raise ValueError(f"epiloq.tune: what: expected sizes (N, K) of at least 1, got {what}")
        for name in schemes:
            yield SCHEMES[name].convert(nn.Linear(k, n, bias=False, device="meta", dtype=DTYPE))
    elif isinstance(what, Iterable) and not isinstance(what, (str, bytes)):
        for each in what:
            yield from _layers_of(each, schemes)
    else:
        raise TypeError(
            f"epiloq.tune: what: expected a model, quantised layers or shapes (N, K), got {type(what).__name__}"
        )


def _check(tokens: Sequence[int], schemes: Sequence[str]) -> None:
    for m in tokens:
        if type(m) is not int or not 1 <= m < 2**31:
            raise ValueError(f"epiloq.tune: tokens: expected integers from 1 to 2^31 - 1, got {m!r}")
    known = [name for name, scheme in SCHEMES.items() if scheme.layer is nn.Linear and not scheme.static]
    for name in schemes:
        if name not in known:
            raise ValueError(f"epiloq.tune: schemes: expected some of {', '.join(known)}, got {name!r}")


def problems_of(
    what: nn.Module | Iterable[Any], tokens: Sequence[int], schemes: Sequence[str] = DEFAULT_SCHEMES
) -> list[Problem]:
    """Return the distinct products of a model, layers or shapes ``(N, K)`` for these numbers of tokens.

    A shape or a float linear layer stands for the layers that it becomes by each scheme. Products without a choice of
    kernels, such as those with 2 and 3 bits, are left out.

    Raises ValueError or TypeError, naming the argument of `epiloq.tune`; ValueError also if there is nothing to tune.
    """
    _check(tokens, schemes)
    products = dict.fromkeys(product for layer in _layers_of(what, schemes) for product in _products_of(layer))
    if not products:
        raise ValueError(
            "epiloq.tune: what: found no linear layer with a choice of kernels; expected a model with linear "
            "layers, or shapes (N, K)"
        )
    return [product.of(m) for product in products for m in dict.fromkeys(tokens) if m in product.tokens]
