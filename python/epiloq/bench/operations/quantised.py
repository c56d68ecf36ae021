"""Shared by the benchmarks of quantising operations: the check of codes and scales, and the peers that all have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epiloq.bench.cases import Case
from epiloq.bench.contract import Binder, Bound, Inputs, Operation, worst

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def error(values: Tensor, q: Tensor, scale: Tensor, *, measured: bool, slack: float) -> float:
    """Error of codes and scales as a multiple of the tolerance.

    Codes must be within half a step of float64 ``values`` over their scale, and a ``measured`` scale must be that of
    the largest magnitude in the last dimension. ``values`` and ``q`` are [..., count], ``scale`` is [..., 1];
    ``slack`` is the relative rounding error that fp32 may add.
    """
    scale, largest = scale.double(), LARGEST[q.dtype]
    over_scale = (values / scale).clamp(-largest, largest)
    step = torch.ones_like(over_scale)
    if q.dtype != torch.int8:
        step = torch.exp2(torch.floor(torch.log2(over_scale.abs().clamp(min=2.0**-6))) - 3)
    errors = [worst((q.double() - over_scale).abs(), 0.5 * step + slack * over_scale.abs())]
    if measured:
        expected = (values.abs().amax(-1, keepdim=True) / largest).clamp(min=SMALLEST_SCALE)
        errors.append(worst((scale - expected).abs(), slack * expected))
    return float(torch.tensor(errors).max())


def by_group(part: Tensor, group: int) -> Tensor:
    """Reshape [..., K] to [..., ceil(K / group), group], padded with zeros."""
    missing = -part.shape[-1] % group
    return torch.nn.functional.pad(part.double(), (0, missing)).view(*part.shape[:-1], -1, group)


def copy_of(operation: Operation) -> Binder:
    """A copy that reads and writes as many bytes in total as the operation."""

    def bind(case: Case, sets: Sequence[Inputs]) -> Bound:
        result = operation.bind(case, sets).calls[0]()
        outputs = result if isinstance(result, tuple) else (result,)
        tensors = [*sets[0].values(), *(part for part in outputs if isinstance(part, Tensor))]
        size, device = sum(part.nbytes for part in tensors) // 2, tensors[0].device
        memory = [torch.zeros((2, size), dtype=torch.uint8, device=device) for _ in sets]
        return Bound([partial(pair[0].copy_, pair[1]) for pair in memory], "same number of bytes")

    return bind


def quantiser(
    name: str,
    inputs: Callable[[Case, torch.Generator], Inputs],
    bind: Binder,
    error: Callable[[Case, Inputs, Any, torch.Generator], float],
    in_torch: Mapping[str, Callable[..., object]],
    peers: Mapping[str, Binder],
    variants: Iterable[str] = (),
) -> Operation:
    """An operation without a product. `in_torch` has its variants in torch's operations, which take the inputs in
    order: peers with and without ``torch.compile``, besides a copy of as many bytes. If it is empty, there are no such
    peers, and `variants` has their names."""

    def eager(case: Case, sets: Sequence[Inputs]) -> Bound:
        return Bound([partial(in_torch[case.variant], *s.values()) for s in sets])

    def compiled(case: Case, sets: Sequence[Inputs]) -> Bound:
        # After a few recompilations dynamo silently runs the function eagerly, so every case starts afresh.
        torch.compiler.reset()
        function = torch.compile(in_torch[case.variant], fullgraph=True, dynamic=False)
        return Bound([partial(function, *s.values()) for s in sets])

    operation = Operation(
        name=name,
        variants=tuple(in_torch) or tuple(variants),
        has_weight=False,
        inputs=inputs,
        bind=bind,
        error=error,
        work=lambda case: 0,
        ceiling="",
        peers={**({"eager": eager, "compiled": compiled} if in_torch else {}), **peers},
    )
    return replace(operation, peers={"copy": copy_of(operation), **operation.peers})
