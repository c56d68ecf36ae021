"""Fits the times of weight_only_mm's kernels on SM90 to sweeps, and says how far behind the fastest their choices are.

    python tools/weight_only_fit.py [benchmarks/results/nvidia-h100/2026-11-26-weight-only-ring-sweep.json ...]
                                    [--tokens 17:] [--only 'kWgmma|kSent'] [--steps 300] [--write]

tools/weight_only_sweep.py makes sweeps; how a fit is made stands in times_fit.py.
"""

from __future__ import annotations

from times_fit import RESULTS, Row, Subject, main
from weight_only_sweep import name_in_sweep

STREAM_TOKENS, RING_TOKENS = 8, 16
# Since 2026-11-26 tiles of up to 64 tokens begin in another way, and blocks that share K end sooner, which no sweep of
# an H200 knows; of more than 64 tokens on that card there are only older ones.
FEW, MANY = range(17), range(65, 2049)


def has_ring(row: Row) -> bool:
    """Older sweeps tell of streams, where nothing else might serve."""
    return any(name.startswith("ring") for name in row["us"])


SUBJECT = Subject(
    header="ops/weight_only_mm/times.h",
    source="weight_only_times.cpp",
    places=(
        r"kStreamSteps\[2\]\[2\]\{.*?\n\};",
        r"kStreamTimes\{.*?\n\};",
        r"double latency.*?\} kStreamTime;",
        r"kWgmmaTimes\{.*?\n\};",
        r"kWgmmaProducts\{.*?\n\};",
        r"kLimitExponent = [^;]*;",
        r"kRingTimes\{.*?\n\};",
        r"kSentSums\{[^}]*\}, kLentSums\{[^}]*\}",
        r"kRingSums\{[^}]*\}",
    ),
    sweeps={
        RESULTS / "nvidia-h100/2026-11-26-weight-only-lent-sweep.json": range(17, 129),
        RESULTS / "nvidia-h100/2026-11-26-weight-only-many-sweep.json": MANY,
        RESULTS / "nvidia-h100/2026-11-27-weight-only-middle-sweep.json": MANY,
        RESULTS / "nvidia-h200/2026-11-25-weight-only-streams-sweep.json": FEW,
        RESULTS / "nvidia-h100/2026-11-25-weight-only-choice-sweep.json": {*FEW, *range(129, 2049)},
        RESULTS / "nvidia-h100/2026-11-26-weight-only-ring-sweep.json": range(9),
        RESULTS / "nvidia-h200/2026-11-26-weight-only-ring-sweep.json": FEW,
        RESULTS / "nvidia-h200/2026-11-26-weight-only-starts-sweep.json": FEW,
        RESULTS / "nvidia-h100/2026-11-26-weight-only-tiles-sweep.json": FEW,
        RESULTS / "nvidia-h200/2026-11-23-weight-only-clusters-sweep.json": MANY,
        RESULTS / "nvidia-h200/2026-11-22-weight-only-ways-sweep.json": MANY,
    },
    name=name_in_sweep,
    takes=lambda row: row["m"] <= STREAM_TOKENS or row["m"] > RING_TOKENS or has_ring(row),
    counts=lambda row, name: row["m"] > RING_TOKENS or has_ring(row) or name.startswith("stream"),
    lacks_constant=False,
    once=range(RING_TOKENS + 1, 2049),
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
