"""PackedWeight: a weight of few bits in the order that the kernels read, with everything that gives it its meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epiloq import _core

BITS = (2, 3, 4, 8)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of the order of bytes in ``q``; files carry it.
LAYOUT = "epiloq-1"
_SLAB, _PADDING = 16, 128
_NUMBERS = ("bits", "n", "k", "group_size")
_TENSORS = ("q", "scale", "zero", "offset", "perm")


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight:
    """A weight ``[N, K]``: ``W[n, k] = scale * (q - zero)`` or ``scale * q + offset``, a group of columns at a time.

    Made by `pack_weight`. The value is immutable: write to none of its tensors. They are the state dict, and with
    ``metadata`` what a file needs:

    - ``q``: uint8 ``[slabs, K / depth, 32, bytes]``, slabs of 16 rows, in the order of the kernels (4 and 8 bits;
      with K padded to a multiple of 128), or in planes of bits (2 and 3);
    - ``scale``: ``[slabs, groups, 16]``; ``zero`` (uint8) or ``offset`` (the scale's dtype) alike, or None: symmetric;
    - ``perm``: int64 ``[K]`` or None: column ``j`` of ``q`` is column ``perm[j]`` of the weight (activation order).
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | None
    offset: Tensor | None
    perm: Tensor | None
    bits: int
    n: int
    k: int
    group_size: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.n, self.k))

    @property
    def symmetric(self) -> bool:
        return self.zero is None and self.offset is None

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    @property
    def metadata(self) -> dict[str, str]:
        """What the tensors do not say themselves, as strings, for the metadata of a safetensors file."""
        return {"layout": LAYOUT, **{name: str(getattr(self, name)) for name in _NUMBERS}}

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that are there, by name, without copies."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> PackedWeight:
        """The weight that ``state_dict()`` and ``metadata`` describe.

        Raises ValueError: another layout, a tensor missing, or tensors that do not fit the sizes.
        """
        if metadata.get("layout") != LAYOUT:
            raise ValueError(f"epiloq.PackedWeight: layout: expected {LAYOUT}, got {metadata.get('layout')}")
        for name in ("q", "scale"):
            if name not in tensors:
                raise ValueError(f"epiloq.PackedWeight: {name}: expected a tensor, got none")
        numbers = {name: int(metadata[name]) for name in _NUMBERS}
        packed = cls(**{name: tensors.get(name) for name in _TENSORS}, **numbers)  # type: ignore[arg-type]
        packed.check()
        # Tensors of a safetensors file lie at addresses that need not be multiples of 16.
        return packed.map(lambda t: t if t.is_meta or t.data_ptr() % 16 == 0 else t.clone())

    def check(self) -> None:
        """Raise ValueError unless every tensor has the shape, the dtype and the device that the sizes ask for."""
        if self.bits not in BITS:
            _refuse("bits", f"one of {BITS}", self.bits, "PackedWeight")
        expected = _shapes(self.bits, self.n, self.k, self.group_size)
        dtypes = {"q": (torch.uint8,), "scale": SCALE_DTYPES, "zero": (torch.uint8,), "perm": (torch.int64,)}
        dtypes["offset"] = (self.scale.dtype,)
        for name, tensor in self.state_dict().items():
            shape = list(expected[name])
            if list(tensor.shape) != shape or tensor.dtype not in dtypes[name] or tensor.device != self.device:
                wanted = f"{' or '.join(map(str, dtypes[name]))} {shape} on {self.device}"
                _refuse(name, wanted, f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}", "PackedWeight")

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The same weight, every tensor replaced by ``change(tensor)``."""
        return replace(self, **{name: change(tensor) for name, tensor in self.state_dict().items()})

    def to(self, device: torch.device | str) -> PackedWeight:
        return self.map(lambda tensor: tensor.to(device))

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(q [N, K], scale [N, groups], zero or offset [N, groups] or None)``, with the values that were packed.

        ``q`` is int8 and signed for a symmetric weight, uint8 otherwise; ``zero`` is uint8.
        """
        codes = _codes_of(self.q, self.bits)[: self.n, : self.k]
        q = codes if not self.symmetric else codes.to(torch.int16).sub_(1 << (self.bits - 1)).to(torch.int8)
        if self.perm is not None:
            q = torch.empty_like(q).index_copy_(1, self.perm, q)
        groups = _groups(self.k, self.group_size)
        scale, zero, offset = (
            None if t is None else _parameters_of(t)[: self.n, :groups].contiguous()
            for t in (self.scale, self.zero, self.offset)
        )
        assert scale is not None
        return q.contiguous(), scale, zero if offset is None else offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[N, K]`` in float32, float16 or bfloat16: product and sum rounded to fp32, then to ``dtype``."""
        out = self.scale.new_empty((self.n, self.k), dtype=dtype)
        _core.dequantize_weight(
            out, self.q, self.scale, self.zero, self.offset, self.bits, self.n, self.k, self.group_size
        )
        return out if self.perm is None else torch.empty_like(out).index_copy_(1, self.perm, out)

    def __repr__(self) -> str:
        zeros = "symmetric" if self.symmetric else "zero points" if self.offset is None else "offsets"
        order = "" if self.perm is None else ", activation order"
        return (
            f"PackedWeight([{self.n}, {self.k}], {self.bits} bits, group_size={self.group_size}, {zeros}, "
            f"{self.scale.dtype} scales{order}, {self.device})"
        )


def pack_weight(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    perm: Tensor | None = None,
) -> PackedWeight:
    """Pack the integers of a weight and their parameters: ``scale * (q - zero)`` or ``scale * q + offset``.

    Args:
        q: any integer dtype ``[N, K]``, columns as the layer has them: from -2^(bits-1) to 2^(bits-1) - 1 with neither
            ``zero`` nor ``offset``, from 0 to 2^bits - 1 with either.
        scale: ``[N, groups]`` float16, bfloat16 or float32, ``groups = ceil(K / group_size)``.
        zero: integers ``[N, groups]`` from 0 to 2^bits, or to 255 for 8 bits. (Old GPTQ files store ``zero - 1``, whose
            largest stands for 2^bits.)
        offset: ``[N, groups]`` of the scale's dtype.
        bits: 2, 3, 4 or 8.
        group_size: columns that share parameters; -1 for the whole row. The last group may be short.
        perm: activation order: integers ``[K]``, a permutation. Group ``g`` is then of columns ``perm[g * group_size]``
            to ``perm[(g + 1) * group_size - 1]``: ``perm = g_idx.argsort(stable=True)`` for a GPTQ checkpoint.

    Returns:
        The weight on q's device.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    _check_integers(q, bits, group_size, zero is None and offset is None)
    n, k = q.shape
    parameters = {"scale": scale, "zero": zero, "offset": offset}
    _check_parameters(parameters, (n, _groups(k, group_size)), bits, q.device)
    order = None if perm is None else _checked_perm(perm, k, q.device)
    codes = q.to(torch.uint8) if q.dtype != torch.int8 else q.view(torch.uint8)
    if zero is None and offset is None:
        codes = codes + (1 << (bits - 1))  # modulo 256: negative numbers come out right
    if order is not None:
        codes = codes.index_select(1, order)
    groups = _shapes(bits, n, k, group_size)["scale"][1]
    return PackedWeight(
        _packed_codes(codes, bits),
        _packed_parameters(scale, groups),
        None if zero is None else _packed_parameters(zero.to(torch.uint8), groups),
        None if offset is None else _packed_parameters(offset, groups),
        order,
        bits,
        n,
        k,
        group_size,
    )


def _refuse(argument: str, expected: object, got: object, operation: str = "pack_weight") -> None:
    raise ValueError(f"epiloq.{operation}: {argument}: expected {expected}, got {got}")


def _check_integers(q: Tensor, bits: int, group_size: int, symmetric: bool) -> None:
    if bits not in BITS:
        _refuse("bits", f"one of {BITS}", bits)
    if group_size != -1 and group_size < 1:
        _refuse("group_size", "-1 or at least 1", group_size)
    _check_range("q", q, *((-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if symmetric else (0, (1 << bits) - 1)))
    if q.ndim != 2:
        _refuse("q", "2 dimensions [N, K]", f"{list(q.shape)}")


def _check_parameters(
    parameters: Mapping[str, Tensor | None], shape: tuple[int, int], bits: int, device: torch.device
) -> None:
    scale, zero, offset = (parameters[name] for name in ("scale", "zero", "offset"))
    assert scale is not None
    if zero is not None and offset is not None:
        _refuse("offset", "None beside zero", f"{offset.dtype} {list(offset.shape)}")
    for name, tensor in parameters.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.device != device:
            _refuse(name, f"{list(shape)} on {device}", f"{list(tensor.shape)} on {tensor.device}")
    if scale.dtype not in SCALE_DTYPES:
        _refuse("scale", "float16, bfloat16 or float32", scale.dtype)
    if offset is not None and offset.dtype != scale.dtype:
        _refuse("offset", f"the scale's {scale.dtype}", offset.dtype)
    if zero is not None:
        _check_range("zero", zero, 0, min(1 << bits, 255))


def _check_range(name: str, tensor: Tensor, low: int, high: int) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        _refuse(name, "integers", tensor.dtype)
    if tensor.numel() == 0 or tensor.is_meta:
        return
    least, most = (int(end) for end in tensor.aminmax())
    if least < low or most > high:
        _refuse(name, f"values from {low} to {high}", f"{least} to {most}")


def _checked_perm(perm: Tensor, k: int, device: torch.device) -> Tensor:
    _check_range("perm", perm, 0, k - 1)
    if perm.shape != (k,) or perm.device != device:
        _refuse("perm", f"[{k}] on {device}", f"{list(perm.shape)} on {perm.device}")
    order = perm.to(torch.int64)
    if not order.is_meta and not bool((order.bincount(minlength=k) == 1).all()):
        _refuse("perm", f"each of 0 to {k - 1} once", "a column twice")
    return order.clone() if order is perm else order


def _groups(k: int, group_size: int) -> int:
    return int(k > 0) if group_size == -1 else -(-k // group_size)


def _shapes(bits: int, n: int, k: int, group_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the packed tensors."""
    slabs, padded = -(-n // _SLAB), -(-k // _PADDING) * _PADDING
    depth, lane_bytes = (32, 16) if bits == 8 else (64, 4 * bits)
    parameters = (slabs, _groups(padded, min(group_size, max(padded, 1))), _SLAB)
    names = dict.fromkeys(("scale", "zero", "offset"), parameters)
    return {"q": (slabs, padded // depth, 32, lane_bytes), **names, "perm": (k,)}


# The orders below are those of src/ops/weight_only_mm/layout.h, which says why they are so: a row is 8 r + g of its
# slab; a column of a tile is 32 b + 8 t + 4 h + 2 p + e.


def _packed_codes(codes: Tensor, bits: int) -> Tensor:
    n, k = codes.shape
    padded_n, padded_k = -(-n // _SLAB) * _SLAB, -(-k // _PADDING) * _PADDING
    if (n, k) != (padded_n, padded_k):
        codes = torch.nn.functional.pad(codes, (0, padded_k - k, 0, padded_n - n))
    shape = _shapes(bits, n, k, -1)["q"]
    slabs, tiles = shape[:2]
    if bits == 8:
        in_order = codes.view(slabs, 2, 8, tiles, 4, 2, 2, 2).permute(0, 3, 2, 4, 5, 6, 1, 7)  # s tile g t h p r e
        return in_order.reshape(shape)
    rows = codes.view(slabs, 2, 8, padded_k)
    if bits == 4:
        pairs = rows[:, 0] | rows[:, 1] << 4
        return pairs.view(slabs, 8, tiles, 2, 4, 2, 2, 2).permute(0, 2, 1, 4, 3, 5, 7, 6).reshape(shape)
    values = rows.view(slabs, 2, 8, tiles, 2, 4, 8).permute(0, 3, 2, 5, 1, 4, 6)  # s tile g t r b (h p e)
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    planes = [((values >> plane & 1) << places).sum(-1, dtype=torch.uint8) for plane in range(bits)]
    return torch.stack([plane.flatten(-2) for plane in planes], dim=-2).reshape(shape)


def _codes_of(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_packed_codes`, with its padding."""
    slabs, tiles = packed.shape[:2]
    rows, columns = slabs * _SLAB, tiles * (32 if bits == 8 else 64)
    if bits == 8:
        in_order = packed.view(slabs, tiles, 8, 4, 2, 2, 2, 2).permute(0, 6, 2, 1, 3, 4, 5, 7)
        return in_order.reshape(rows, columns)
    if bits == 4:
        pairs = packed.view(slabs, tiles, 8, 4, 2, 2, 2, 2).permute(0, 2, 1, 4, 3, 5, 7, 6).reshape(slabs, 8, columns)
        return torch.stack((pairs & 15, pairs >> 4), dim=1).view(rows, columns)
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    planes = packed.view(slabs, tiles, 8, 4, bits, 2, 2, 1) >> places & 1  # s tile g t plane r b (h p e)
    values = sum((planes.select(4, plane) << plane for plane in range(1, bits)), planes.select(4, 0))
    return values.permute(0, 4, 2, 1, 5, 3, 6).reshape(rows, columns)


def _packed_parameters(values: Tensor, groups: int) -> Tensor:
    n, given = values.shape
    slabs = -(-n // _SLAB)
    padded = torch.nn.functional.pad(values, (0, groups - given, 0, slabs * _SLAB - n))
    return padded.view(slabs, 2, 8, groups).permute(0, 3, 2, 1).reshape(slabs, groups, _SLAB)


def _parameters_of(packed: Tensor) -> Tensor:
    slabs, groups, _ = packed.shape
    return packed.view(slabs, groups, 8, 2).permute(0, 3, 2, 1).reshape(slabs * _SLAB, groups)
