"""The matrices of a mixture's experts, stacked: how many there are, and the rows that each multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from epiloq.weights.packed_layout import PANEL_ROWS
from epiloq.weights.tensor_checks import described, refuse


def number_of(operation: str, x: Tensor, n: int, k: int, counts: Tensor, masked: bool) -> int:
    """Number of experts. Raises ValueError, for an operation, unless rows `x`, `counts` (``masked_m`` if `masked`, else
    ``offs``) and a weight of `n` rows and `k` columns match."""
    if counts.ndim != 1 or counts.dtype != torch.int32 or counts.numel() == 0:
        refuse(operation, "masked_m" if masked else "offs", "int32 [E]", described(counts))
    experts = counts.numel()
    if n % experts or n // experts % PANEL_ROWS:
        refuse(operation, "weight", f"{experts} matrices of a multiple of {PANEL_ROWS} rows, stacked", f"{n} rows")
    if x.ndim != (3 if masked else 2) or x.shape[-1] != k or (masked and x.shape[0] != experts):
        wanted = f"[{experts}, M, K]" if masked else "[M, K]"
        refuse(operation, "x", f"{wanted} with {k} columns", described(x))
    return experts


def places(operation: str, counts: Tensor, x: Tensor) -> Iterator[tuple[int, Any]]:
    """Experts that have rows, and the positions of the rows. Raises ValueError for invalid counts, and RuntimeError
    while a CUDA graph is captured, which cannot pass them to the host."""
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        name = "masked_m" if x.ndim == 3 else "offs"
        raise RuntimeError(
            f"epiloq.{operation}: {name}: expected to be called outside a CUDA graph, got a graph that is captured: no "
            f"kernel multiplies all experts for {described(x)} and this weight, so that the host reads {name}; use x "
            "of 16 bits and a weight that the operation lists, or run this without a graph"
        )
    begin, most = 0, x.shape[-2]
    for expert, count in enumerate(counts.tolist()):
        low = 0 if x.ndim == 3 else begin
        if not low <= count <= most:
            name, wanted = ("masked_m", f"0 to {most}") if x.ndim == 3 else ("offs", f"ascending ends up to {most}")
            refuse(operation, name, wanted, counts.tolist())
        if count > low:
            yield expert, ((expert, slice(count)) if x.ndim == 3 else slice(low, count))
        begin = count


def each(scale: Tensor | None, experts: int) -> Tensor | None:
    """A global scale for each expert, from one for all or for each."""
    return scale if scale is None or scale.numel() == experts else scale.expand(experts).contiguous()
