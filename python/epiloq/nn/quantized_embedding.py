"""QuantizedEmbedding: an embedding whose rows are low-bit integers, looked up and then dequantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from epiloq._torch.calls import reads_values
from epiloq._torch.parameters import FrozenParameter
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.packed_linear import check_grid, kind_of_zeros, nearest
from epiloq.nn.base.quantized_layer import QuantizedLayer, check_positive
from epiloq.nn.base.stored_tensors import expected
from epiloq.nn.weight_only_linear import WeightOnlyLinear
from epiloq.weights.computed import check_finite, check_readable
from epiloq.weights.packed.rows import rows_of
from epiloq.weights.packed_weight import SCALE_DTYPES, PackedWeight, pack_weight

_PARTS = ("q", "scale", "zero", "offset")
_STORED = tuple(f"weight_{part}" for part in _PARTS)


class QuantizedEmbedding(QuantizedLayer):
    """``weight[ids]`` with a weight ``[num_embeddings, embedding_dim]`` of 2, 3, 4 or 8 bits.

    `ids` are int32 or int64 of any shape ``[…]``, and the result is ``[…, embedding_dim]`` in the
    float dtype of the layer (`dtype`; ``.to(dtype)`` changes it): the rows are gathered as integers, dequantised in
    float32 and rounded once. The weight is packed as an ``epiloq.PackedWeight``, so that an output head tied to the
    embedding can multiply by the same tensors: see `tied_linear`.

    zeros
        "none" (symmetric), "zero" (integer zero points) or "offset" (real ones).
    padding_idx
        As for ``torch.nn.Embedding``; the row is looked up like any other.
    embed_scale, embed_scale_rounded
        A factor for the result, which Gemma rounds to `dtype` before multiplying.

    Parameters without gradients, which form the state dict: `weight_q`, `weight_scale` and, if present, `weight_zero`
    or `weight_offset`. `packed` is these as a value, `weight` the dequantised weight, computed on access.

    Raises ValueError for sizes below 1, other bits, group sizes or zeros.
    """

    weight_q: Tensor
    weight_scale: Tensor
    weight_zero: Tensor | None
    weight_offset: Tensor | None
    bias = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        bits: int = 8,
        group_size: int = -1,
        zeros: str = "none",
        embed_scale: float = 1.0,
        embed_scale_rounded: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        check_positive("QuantizedEmbedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        packed = PackedWeight.empty(
            num_embeddings, embedding_dim, bits, group_size, zeros=zeros, dtype=self._dtype, device=device
        )
        self._take(packed, padding_idx, embed_scale, embed_scale_rounded)

    def _take(self, packed: PackedWeight, padding_idx: int | None, scale: float, rounded: bool) -> None:
        self.num_embeddings, self.embedding_dim = packed.n, packed.k
        self.bits, self.group_size, self.padding_idx = packed.bits, packed.group_size, padding_idx
        self.embed_scale, self.embed_scale_rounded = scale, rounded
        for name in _PARTS:
            self._store(f"weight_{name}", getattr(packed, name))

    @classmethod
    def from_packed(
        cls,
        weight: PackedWeight,
        padding_idx: int | None = None,
        *,
        embed_scale: float = 1.0,
        embed_scale_rounded: bool = False,
        dtype: torch.dtype | None = None,
    ) -> QuantizedEmbedding:
        """Create a layer that shares the tensors of a packed weight ``[num_embeddings, embedding_dim]``.

        `dtype` is that of the result, by default the scales'. Raises ValueError for activation order.
        """
        if weight.perm is not None:
            raise ValueError("QuantizedEmbedding: weight: expected its columns in order, got activation order")
        layer = cls.__new__(cls)
        QuantizedLayer.__init__(layer, weight.scale.dtype if dtype is None else dtype)
        layer._take(weight, padding_idx, embed_scale, embed_scale_rounded)
        return layer

    @classmethod
    @torch.no_grad()
    def from_embedding(
        cls, embedding: nn.Embedding, *, bits: int = 8, group_size: int = -1, zeros: str = "none"
    ) -> QuantizedEmbedding:
        """Round `embedding` (which is not changed) to the nearest grid of each group, as
        ``WeightOnlyLinear.from_linear``.

        Raises ValueError unless `embedding` is a float32, float16 or bfloat16 ``nn.Embedding``, one with `max_norm`,
        `scale_grad_by_freq` or `sparse`, for a subclass that does more than multiply rows by a number, other zeros,
        and non-finite weights.
        """
        check_grid("QuantizedEmbedding", bits, group_size, zeros)
        factor, rounded = factor_of(embedding)
        weight, symmetric = embedding.weight, zeros == "none"
        check_finite("QuantizedEmbedding: embedding.weight", weight)
        options: dict[str, Any] = {"embed_scale": factor, "embed_scale_rounded": rounded}
        if weight.is_meta:
            options |= {"bits": bits, "group_size": group_size, "zeros": zeros, "device": "meta"}
            sizes = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
            layer = cls(*sizes, **options, dtype=weight.dtype)
        else:
            packed = pack_weight(*nearest(weight, bits, group_size, symmetric), bits=bits, group_size=group_size)
            layer = cls.from_packed(packed, embedding.padding_idx, **options, dtype=weight.dtype)
        return layer.train(embedding.training)

    @staticmethod
    def check_convertible(embedding: nn.Module, **options: Any) -> None:
        """Raise ValueError unless ``from_embedding`` supports `embedding`."""
        factor_of(embedding)
        check_finite("QuantizedEmbedding: embedding.weight", embedding.weight)  # type: ignore[arg-type]

    @torch.no_grad()
    def hold_scales_in_dtype_(self) -> None:
        """Store scales and offsets in the layer's `dtype` if it represents all of them exactly. (transformers'
        ``dtype`` is the type of a model's first floating-point parameter.)
        """
        for name in ("weight_scale", "weight_offset"):
            held = self._parameters[name]
            if held is not None and held.dtype != self.dtype and torch.equal(held.to(self.dtype).float(), held.float()):
                self._store(name, held.to(self.dtype))

    def tied_linear(self, bias: Tensor | None = None) -> WeightOnlyLinear:
        """Create an output head that shares this layer's parameters."""
        layer = WeightOnlyLinear.from_packed(self.packed, bias)
        layer._dtype = self._dtype
        for name in _STORED:
            layer._parameters[name] = self._parameters[name]
        return layer.train(self.training)

    def share_(self, other: QuantizedEmbedding) -> None:
        """Share the parameters of a layer of the same shape and grid."""
        for name in _STORED:
            self._parameters[name] = other._parameters[name]

    @property
    def zeros(self) -> str:
        """ "none", "zero" or "offset", as in the constructor."""
        return kind_of_zeros(self)

    @property
    def packed(self) -> PackedWeight:
        """The weight as a value that shares the parameters' memory."""
        q, scale, zero, offset = self._all_stored(_STORED)
        numbers = (self.bits, self.num_embeddings, self.embedding_dim, self.group_size)
        return PackedWeight(q, scale, zero, offset, None, *numbers)

    def forward(self, input: Tensor) -> Tensor:
        if is_symbolic(input):
            return as_leaf(self, input)
        ids = input
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"QuantizedEmbedding: ids: expected a tensor of int32 or int64, got {got}")
        if ids.device.type == "cpu" and reads_values(ids) and ids.numel():
            low, high = map(int, ids.aminmax())
            if low < 0 or high >= self.num_embeddings:
                wanted = f"0 to {self.num_embeddings - 1}"
                raise IndexError(f"QuantizedEmbedding: ids: expected {wanted}, got {low} to {high}")
        with torch.no_grad():
            rows = rows_of(self.packed, ids.reshape(-1).long()).to(self.dtype)
            rows = self._scaled(rows.view(*ids.shape, self.embedding_dim))
        return rows

    def _scaled(self, rows: Tensor) -> Tensor:
        if self.embed_scale == 1.0:
            return rows
        if self.embed_scale_rounded:
            return rows * torch.full((), self.embed_scale, dtype=rows.dtype, device=rows.device)
        return rows * self.embed_scale

    def dequantized_weight(self) -> Tensor:
        return self.packed.dequantize()

    @property
    def weight_bytes(self) -> int:
        """Size of the quantised weight in memory, in bytes: integers with padding, scales, zero points."""
        return self.packed.nbytes

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``[num_embeddings, embedding_dim]``."""
        return self.num_embeddings, self.embedding_dim

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}, group_size={self.group_size}"
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        scale = "" if self.embed_scale == 1.0 else f", embed_scale={self.embed_scale:g}"
        return f"{text}, zeros={self.zeros}{padding}{scale}"

    def _fitting(self, name: str, given: Tensor, held: Tensor) -> Tensor | str:
        both_float = given.dtype in SCALE_DTYPES and held.is_floating_point()
        if given.shape != held.shape or not (both_float or given.dtype == held.dtype):
            return expected(held, given)
        if given.dtype != held.dtype:
            self._parameters[name] = FrozenParameter(torch.empty_like(held, dtype=given.dtype))
        return given


_ONLY_FOR_GRADIENTS = ("scale_grad_by_freq", "sparse")


def factor_of(embedding: nn.Module) -> tuple[float, bool]:
    """The factor by which an embedding multiplies its rows, and whether it is rounded to their type first, found by
    running it. Raises ValueError for embeddings that `from_embedding` does not support.
    """
    where = "QuantizedEmbedding: embedding"
    if not isinstance(embedding, nn.Embedding):
        raise ValueError(f"{where}: expected a torch.nn.Embedding, got {type(embedding).__name__}")
    if embedding.max_norm is not None:
        raise ValueError(f"{where}: max_norm: expected None, because it modifies rows when they are read")
    for name in _ONLY_FOR_GRADIENTS:
        if getattr(embedding, name):
            raise ValueError(f"{where}: {name}: expected False, because a quantised weight has no gradient")
    check_readable("QuantizedEmbedding", embedding, "embedding")
    parameters = [name for name, _ in embedding.named_parameters()]
    held = [*parameters, *(name for name, _ in embedding.named_children())]
    if held != ["weight"] or torch.nn.utils.parametrize.is_parametrized(embedding):
        raise ValueError(f"{where}: expected no parameters and modules but weight, got {', '.join(held)}")
    if type(embedding) is nn.Embedding:
        return 1.0, False
    found = _probed(embedding)
    if found is None:
        raise ValueError(
            f"{where}: {type(embedding).__name__}: expected an embedding that returns its rows, possibly multiplied by "
            "embed_scale; leave it in floating point"
        )
    return found


@torch.no_grad()
def _probed(embedding: nn.Embedding) -> tuple[float, bool] | None:
    """`factor_of` for a subclass, found with a copy that has few rows; None if it computes something else.

    Tested on the CPU, regardless of defaults: transformers opens models with the meta device as default.
    """
    with torch.device("cpu"):
        return _probed_here(embedding)


def _probed_here(embedding: nn.Embedding) -> tuple[float, bool] | None:
    scale = getattr(embedding, "embed_scale", 1.0)
    if isinstance(scale, Tensor) and scale.is_meta:
        scale = getattr(embedding, "scalar_embed_scale", None)
    if isinstance(scale, Tensor) and scale.numel() == 1:
        scale = float(scale)
    if not isinstance(scale, (int, float)):
        return None
    small = embedding.__class__.__new__(embedding.__class__)
    small.__dict__.update(vars(embedding))
    weight = torch.linspace(-1, 1, 60, dtype=torch.float64).to(embedding.weight.dtype).view(12, 5)
    small._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    small._buffers = {
        name: b if b is None else torch.tensor(float(scale), dtype=b.dtype) if b.is_meta and b.numel() == 1 else b.cpu()
        for name, b in embedding._buffers.items()
    }
    small.num_embeddings, small.embedding_dim, small.padding_idx = 12, 5, None
    ids = torch.tensor([[3, 0, 11], [7, 7, 1]])
    try:
        y = type(embedding).forward(small, ids)
    except Exception:  # a subclass that cannot look up plain ids is not supported
        return None
    plain = weight[ids]
    for rounded in (True, False):
        factor: Any = torch.full((), scale, dtype=plain.dtype) if rounded else float(scale)
        if isinstance(y, Tensor) and y.dtype == plain.dtype and torch.equal(y, plain * factor):
            # In float32, rounding the factor makes no difference.
            return float(scale), rounded and float(scale) != 1.0
    return None
