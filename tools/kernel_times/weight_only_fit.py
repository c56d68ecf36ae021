"""Fits the times of weight_only_mm's kernels on SM90 to sweeps, and says how far behind the fastest their choices are.

    python tools/kernel_times/weight_only_fit.py [sweep.json ...]
                                    [--tokens 17:] [--only 'kWgmma|kSent'] [--steps 300] [--write]

weight_only_sweep.py makes sweeps; how a fit is made stands in times_fit.py.
"""

from __future__ import annotations

from times_fit import MEASURED, Row, Subject, main
from weight_only_sweep import name_in_sweep

STREAM_TOKENS, RING_TOKENS = 8, 16


def has_ring(row: Row) -> bool:
    """Older sweeps tell of streams, where nothing else might serve."""
    return any(name.startswith("ring") for name in row["us"])


SUBJECT = Subject(
    header="dispatch/weight_only_mm/costs.h",
    source="weight_only_times.cpp",
    places=(
        r"kGemvSteps\[2\]\[2\]\{.*?\n\};",
        r"kGemvTimes\{.*?\n\};",
        r"double latency.*?\} kGemvTime;",
        r"kWgmmaTimes\{.*?\n\};",
        r"kWgmmaProducts\{.*?\n\};",
        r"kLimitExponent = [^;]*;",
        r"kDecodeTimes\{.*?\n\};",
        r"kSentSums\{[^}]*\}, kLentSums\{[^}]*\}",
        r"kDecodeSums\{[^}]*\}",
    ),
    sweeps=(MEASURED / "weight_only_h100.json", MEASURED / "weight_only_h200.json"),
    name=name_in_sweep,
    takes=lambda row: row["m"] <= STREAM_TOKENS or row["m"] > RING_TOKENS or has_ring(row),
    counts=lambda row, name: row["m"] > RING_TOKENS or has_ring(row) or name.startswith("stream"),
    lacks_constant=False,
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
