"""Registry of benchmarked operations, and expansion of suites to cases."""

from __future__ import annotations

from collections.abc import Sequence

from epiloq.bench.cases import SUITES, Case
from epiloq.bench.contract import Operation
from epiloq.bench.operations import (
    convolution,
    float8_mm,
    fused_quantisers,
    grouped_mm,
    layer,
    online_quant_mm,
    quantize_blockwise_int8,
    quantize_fp8,
    quantize_int8,
    scaled_bmm,
    scaled_mm,
)
from epiloq.bench.operations.packed import grouped_packed_mm, packed_fp4_mm, w4a8_mm, weight_only_mm

_ROWS = (
    scaled_mm.OPERATION,
    float8_mm.ROWS,
    float8_mm.GROUPS,
    grouped_mm.OPERATION,
    grouped_packed_mm.OPERATION,
    scaled_bmm.OPERATION,
    online_quant_mm.OPERATION,
    layer.OPERATION,
    weight_only_mm.OPERATION,
    w4a8_mm.OPERATION,
    packed_fp4_mm.OPERATION,
    convolution.INT8,
    convolution.WEIGHT_ONLY,
    quantize_int8.OPERATION,
    quantize_fp8.OPERATION,
    quantize_blockwise_int8.OPERATION,
    fused_quantisers.NORM,
    fused_quantisers.GATE,
    fused_quantisers.GPT_OSS_GATE,
)
OPERATIONS: dict[str, Operation] = {row.name: row for row in _ROWS}


def expand(
    suites: Sequence[str], operations: Sequence[str] = (), variants: Sequence[str] = (), tokens: Sequence[int] = ()
) -> list[Case]:
    """Return the distinct cases of the named suites, in order.

    ``operations`` selects among them; ``variants`` and ``tokens`` replace those of the suites. For an operation
    without a weight, shapes with the same K are one case.
    """
    cases: dict[Case, None] = {}
    for suite in (SUITES[name] for name in suites):
        for name, default in suite.variants.items():
            if operations and name not in operations:
                continue
            operation = OPERATIONS[name]
            for variant in [v for v in operation.variants if v in variants] if variants else default:
                for shape in suite.shapes:
                    layer, n = (shape.layer, shape.n) if operation.has_weight else ("", 0)
                    for m in tokens or suite.tokens:
                        cases[Case(name, variant, layer, m, n, shape.k)] = None
    return list(cases)


def default_peers(suites: Sequence[str]) -> list[str]:
    """Return the peers that the named suites are compared with."""
    names: dict[str, None] = {}
    for suite in (SUITES[name] for name in suites):
        names |= dict.fromkeys(suite.peers or (peer for name in suite.variants for peer in OPERATIONS[name].peers))
    return list(names)
