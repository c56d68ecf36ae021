"""Checks of the tensors of a packed weight: sizes, ranges, dtypes, and column permutations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from epiloq.weights.tensor_checks import refuse

BITS = (2, 3, 4, 8)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDE = (torch.uint16, torch.uint32, torch.uint64)


def check_sizes(bits: int, group_size: int, operation: str, **sizes: int) -> None:
    """Raise ValueError for sizes that a packed weight cannot have."""
    if type(bits) is not int or bits not in BITS:
        refuse(operation, "bits", f"one of {BITS}", repr(bits))
    if type(group_size) is not int or (group_size != -1 and group_size < 1):
        refuse(operation, "group_size", "-1 or at least 1", repr(group_size))
    if group_size >= 1 << 31:
        refuse(operation, "group_size", "less than 2^31", group_size)
    for name, size in sizes.items():
        if size < 0:
            refuse(operation, name, "at least 0", size)


def check_integers(q: Tensor, bits: int, group_size: int, symmetric: bool) -> None:
    check_sizes(bits, group_size, "pack_weight")
    check_range("q", q, *((-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if symmetric else (0, (1 << bits) - 1)))
    if q.ndim != 2:
        refuse("pack_weight", "q", "2 dimensions [N, K]", f"{list(q.shape)}")


def check_parameters(
    parameters: Mapping[str, Tensor | None], shape: tuple[int, int], bits: int, device: torch.device
) -> None:
    scale, zero, offset = (parameters[name] for name in ("scale", "zero", "offset"))
    assert scale is not None
    if zero is not None and offset is not None:
        refuse("pack_weight", "offset", "None with zero", f"{offset.dtype} {list(offset.shape)}")
    for name, tensor in parameters.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.device != device:
            refuse("pack_weight", name, f"{list(shape)} on {device}", f"{list(tensor.shape)} on {tensor.device}")
    if scale.dtype not in SCALE_DTYPES:
        refuse("pack_weight", "scale", "float16, bfloat16 or float32", scale.dtype)
    if offset is not None and offset.dtype != scale.dtype:
        refuse("pack_weight", "offset", f"the scale's {scale.dtype}", offset.dtype)
    if zero is not None:
        check_range("zero", zero, 0, min(1 << bits, 255))


def check_range(name: str, tensor: Tensor, low: int, high: int, operation: str = "pack_weight") -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        refuse(operation, name, "integers", tensor.dtype)
    if tensor.numel() == 0 or tensor.is_meta:
        return
    if tensor.dtype in _WIDE:  # torch has no minimum for these dtypes; values beyond int64 become negative
        low, tensor = max(low, 0), tensor.to(torch.int64)
    least, most = (int(end) for end in tensor.aminmax())
    if least < low or most > high:
        refuse(operation, name, f"values from {low} to {high}", f"{least} to {most}")


def checked_perm(perm: Tensor, k: int, device: torch.device, operation: str = "pack_weight") -> Tensor:
    """Return a copy of a permutation of ``k`` columns as int64. Raises ValueError if it is not a permutation."""
    check_range("perm", perm, 0, k - 1, operation)
    if perm.shape != (k,) or perm.device != device:
        refuse(operation, "perm", f"[{k}] on {device}", f"{list(perm.shape)} on {perm.device}")
    order = perm.to(torch.int64, copy=True)
    if not order.is_meta and not bool((order.bincount(minlength=k) == 1).all()):
        refuse(operation, "perm", f"each of 0 to {k - 1} once", "a column twice")
    return order
