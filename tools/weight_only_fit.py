"""Fits the times of weight_only_mm's streams and ring on SM90 to sweeps, and says how far behind the fastest their
choices are.

    python tools/weight_only_fit.py [benchmarks/results/nvidia-h100/2026-11-26-weight-only-ring-sweep.json ...]
                                    [--steps 300] [--write]

tools/weight_only_sweep.py makes sweeps; how a fit is made stands in times_fit.py.
"""

from __future__ import annotations

from times_fit import RESULTS, Row, Subject, main
from weight_only_sweep import name_in_sweep

MOST_TOKENS, STREAM_TOKENS = 16, 8


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
        r"kRingTimes\{.*?\n\};",
        r"kRingSums\{[^}]*\}",
    ),
    sweeps=(
        RESULTS / "nvidia-h200/2026-11-25-weight-only-streams-sweep.json",
        RESULTS / "nvidia-h100/2026-11-25-weight-only-choice-sweep.json",
        RESULTS / "nvidia-h100/2026-11-26-weight-only-ring-sweep.json",
        RESULTS / "nvidia-h200/2026-11-26-weight-only-ring-sweep.json",
        RESULTS / "nvidia-h200/2026-11-26-weight-only-starts-sweep.json",
    ),
    name=name_in_sweep,
    takes=lambda row: row["m"] <= (MOST_TOKENS if has_ring(row) else STREAM_TOKENS),
    counts=lambda row, name: has_ring(row) or name.startswith("stream"),
    lacks_constant=False,
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
