"""PackedWeight: a low-bit weight in the kernels' order, with its scales and zero points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epiloq._torch.calls import expect_tensors
from epiloq.weights.packed.checks import BITS as BITS
from epiloq.weights.packed.checks import SCALE_DTYPES as SCALE_DTYPES
from epiloq.weights.packed.checks import check_integers, check_parameters, check_sizes, checked_perm
from epiloq.weights.packed.dequantize import dequantize_weight
from epiloq.weights.packed.tensors import PackedTensors
from epiloq.weights.packed_layout import (
    PANEL_ROWS,
    codes_of,
    groups_of,
    packed_codes,
    packed_parameters,
    parameters_of,
    recoded,
    shapes_of,
)
from epiloq.weights.tensor_checks import refuse

ZEROS = ("none", "zero", "offset")
# Version of the byte order of ``q``, stored in files.
LAYOUT = "epiloq-2"
_NUMBERS = ("bits", "n", "k", "group_size")


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(PackedTensors):
    """A weight ``[N, K]``: ``W[n, k] = scale * (q - zero)`` or ``scale * q + offset``, parameters per group of columns.

    Made by `pack_weight`. The value is immutable: do not write to its tensors. (On SM90, kernels read them before the
    preceding kernel has finished. They may be filled by copies and element-wise operations of eager torch. Kernels
    that trigger programmatic dependent launch, which epiloq's do and compiled code may, must be followed by a stream
    synchronisation.) The tensors form the state dict and, with ``metadata``, the content of a file:

    - ``q``: uint8 ``[blocks, K / depth, 32, bytes]``, blocks of 16 rows, in the order of the kernels, with K padded
      to a multiple of 128;
    - ``scale``: ``[blocks, groups, 16]``; ``zero`` (uint8) or ``offset`` (the scale's dtype) in the same shape, both
      None if symmetric;
    - ``perm``: int64 ``[K]`` or None: column ``j`` of ``q`` is column ``perm[j]`` of the weight (activation order).
    """

    TENSORS = ("q", "scale", "zero", "offset", "perm")

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
    def metadata(self) -> dict[str, str]:
        """Properties that the tensors do not determine, as strings, for the metadata of a safetensors file."""
        return {"layout": LAYOUT, **{name: str(getattr(self, name)) for name in _NUMBERS}}

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> PackedWeight:
        """Create the weight from ``state_dict()`` and ``metadata``.

        Raises ValueError: another layout, a missing tensor, or tensors that do not match the sizes.
        """
        if metadata.get("layout") != LAYOUT:
            raise ValueError(f"epiloq.PackedWeight: layout: expected {LAYOUT}, got {metadata.get('layout')}")
        for name in ("q", "scale"):
            if name not in tensors:
                raise ValueError(f"epiloq.PackedWeight: {name}: expected a tensor, got none")
        numbers = {name: _number(name, metadata.get(name)) for name in _NUMBERS}
        packed = cls(**{name: tensors.get(name) for name in cls.TENSORS}, **numbers)  # type: ignore[arg-type]
        packed.check()
        if packed.perm is not None:
            checked_perm(packed.perm, packed.k, packed.device, "PackedWeight")
        # Tensors of a safetensors file need not be 16-byte aligned.
        return packed.map(lambda t: t if t.is_meta or t.data_ptr() % 16 == 0 else t.clone())

    @classmethod
    def empty(
        cls,
        n: int,
        k: int,
        bits: int,
        group_size: int,
        *,
        zeros: str = "none",
        act_order: bool = False,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ) -> PackedWeight:
        """A weight of zeros into which another can be loaded; ``zeros`` is "none", "zero" or "offset", ``dtype`` that
        of scales."""
        check_sizes(bits, group_size, "PackedWeight", n=n, k=k)
        if zeros not in ZEROS:
            refuse("PackedWeight", "zeros", f"one of {', '.join(ZEROS)}", repr(zeros))
        if dtype not in SCALE_DTYPES:
            refuse("PackedWeight", "dtype", "float16, bfloat16 or float32", dtype)
        shapes = shapes_of(bits, n, k, group_size)
        dtypes = {"q": torch.uint8, "scale": dtype, "zero": torch.uint8, "offset": dtype}
        tensors = {
            name: torch.zeros(shapes[name], dtype=kind, device=device)
            for name, kind in dtypes.items()
            if name in ("q", "scale", zeros)
        }
        if act_order:
            tensors["perm"] = torch.arange(k, device=device)
        numbers = {"bits": bits, "n": n, "k": k, "group_size": group_size}
        return cls(**{name: tensors.get(name) for name in cls.TENSORS}, **numbers)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise ValueError unless each tensor is contiguous, with the shape, dtype and device that the sizes imply."""
        check_sizes(self.bits, self.group_size, "PackedWeight", n=self.n, k=self.k)
        if self.zero is not None and self.offset is not None:
            refuse("PackedWeight", "offset", "None with zero", f"{self.offset.dtype} {list(self.offset.shape)}")
        expected = shapes_of(self.bits, self.n, self.k, self.group_size)
        dtypes = {"q": (torch.uint8,), "scale": SCALE_DTYPES, "zero": (torch.uint8,), "perm": (torch.int64,)}
        dtypes["offset"] = (self.scale.dtype,)
        for name, tensor in self.state_dict().items():
            shape = list(expected[name])
            if list(tensor.shape) != shape or tensor.dtype not in dtypes[name] or tensor.device != self.device:
                wanted = f"{' or '.join(map(str, dtypes[name]))} {shape} on {self.device}"
                refuse("PackedWeight", name, wanted, f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}")
            if not tensor.is_contiguous():
                refuse("PackedWeight", name, "contiguous memory", f"strides {tensor.stride()}")

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(q [N, K], scale [N, groups], zero or offset [N, groups] or None)``, with the values that were packed.

        ``q`` is int8 for a symmetric weight and uint8 otherwise, with the columns in the order given to
        `pack_weight`; ``zero`` is uint8.
        """
        codes = codes_of(self.q, self.bits)[: self.n, : self.k]
        q = codes if not self.symmetric else codes.to(torch.int16).sub_(1 << (self.bits - 1)).to(torch.int8)
        groups = groups_of(self.k, self.group_size)
        scale, zero, offset = (
            None if t is None else parameters_of(t)[: self.n, :groups].contiguous()
            for t in (self.scale, self.zero, self.offset)
        )
        assert scale is not None
        return q.contiguous(), scale, zero if offset is None else offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[N, K]`` in float32, float16 or bfloat16, columns in the order of the layer's inputs.

        Product and sum are each rounded to fp32, then to ``dtype``; CPU and GPU give the same bits.
        """
        numbers = (self.bits, self.n, self.k, self.group_size)
        out = dequantize_weight(self.q, self.scale, self.zero, self.offset, *numbers, dtype)
        return out if self.perm is None else torch.empty_like(out).index_copy_(1, self.perm, out)

    def integers(self, dtype: torch.dtype = torch.int8) -> Tensor:
        """The differences ``q - zero`` ``[N, K]`` without their scales, exactly, as the operand of an 8-bit product.

        ``dtype`` is int8, or float8_e4m3fn for at most 4 bits. Columns are in the packed order (``perm``). Raises
        ValueError for a weight with offsets, and if the type cannot represent the integers: float8 for 8 bits, int8
        for 8 bits with zero points.
        """
        if dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(f"PackedWeight.integers: dtype: expected torch.int8 or torch.float8_e4m3fn, got {dtype}")
        numbers = (self.bits, self.n, self.k, self.group_size)
        return dequantize_weight(self.q, self.scale, self.zero, self.offset, *numbers, dtype)

    def in_bits(self, bits: int) -> PackedWeight:
        """The same weight with codes of 2, 3, 4 or 8 bits; integers, zero points and scales do not change.

        Raises ValueError for integers or zero points that do not fit.
        """
        check_sizes(bits, self.group_size, "PackedWeight.in_bits")
        if bits == self.bits:
            return self
        too_high = self.zero is not None and self.zero.numel() and int(self.zero.max()) > min(1 << bits, 255)
        try:
            q = recoded(self.q, self.bits, bits, (self.n, self.k), self.symmetric)
        except ValueError:
            q = None
        if q is None or too_high:
            refuse("PackedWeight.in_bits", "bits", "enough for the weight's integers and zero points", bits)
        return replace(self, q=q, bits=bits)

    def row_slice(self, first: int, last: int) -> PackedWeight:
        """Rows `first` (a multiple of 16) to `last` of the weight, which share its memory."""
        panels = slice(first // PANEL_ROWS, -(-last // PANEL_ROWS))
        parts = {name: t if name == "perm" else t[panels] for name, t in self.state_dict().items()}
        return replace(self, n=last - first, **parts)  # type: ignore[arg-type]

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
        q: any integer dtype ``[N, K]``: from -2^(bits-1) to 2^(bits-1) - 1 with neither ``zero`` nor ``offset``, from 0
            to 2^bits - 1 with either.
        scale: ``[N, groups]`` float16, bfloat16 or float32, ``groups = ceil(K / group_size)``. float8 scales are
            converted to bfloat16 (exactly) or, if there is a scale per channel too, their product to float32.
        zero: integers ``[N, groups]`` from 0 to 2^bits, or to 255 for 8 bits. (Old GPTQ files store ``zero - 1``, so
            that the largest value means 2^bits.)
        offset: ``[N, groups]`` of the scale's dtype.
        bits: 2, 3, 4 or 8.
        group_size: columns that share parameters; -1 for the whole row. The last group may be short.
        perm: activation order: a permutation, integers ``[K]``. Column ``j`` of ``q`` is input feature ``perm[j]``,
            and groups are formed from ``q``'s columns. For a weight in the layer's order whose column ``c`` belongs
            to group ``g_idx[c]``, use ``perm = g_idx.argsort(stable=True)`` and ``q[:, perm]``.

    Returns:
        The weight on q's device.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
    """
    expect_tensors(
        "pack_weight", {"q": q, "scale": scale}, {"zero": zero, "offset": offset, "perm": perm}, writes=False
    )
    check_integers(q, bits, group_size, zero is None and offset is None)
    n, k = q.shape
    parameters = {"scale": scale, "zero": zero, "offset": offset}
    check_parameters(parameters, (n, groups_of(k, group_size)), bits, q.device)
    order = None if perm is None else checked_perm(perm, k, q.device)
    codes = q.to(torch.uint8) if q.dtype != torch.int8 else q.view(torch.uint8)
    if zero is None and offset is None:
        codes = codes + (1 << (bits - 1))  # uint8 arithmetic is modulo 256, so negative numbers are correct
    groups = shapes_of(bits, n, k, group_size)["scale"][1]
    return PackedWeight(
        packed_codes(codes, bits),
        packed_parameters(scale, groups),
        None if zero is None else packed_parameters(zero.to(torch.uint8), groups),
        None if offset is None else packed_parameters(offset, groups),
        order,
        bits,
        n,
        k,
        group_size,
    )


def _number(name: str, text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        return refuse("PackedWeight", name, "a number", text)
