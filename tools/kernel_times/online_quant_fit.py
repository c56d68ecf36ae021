"""Fits the cost model of online_quant_mm on SM90 to sweeps, and reports the losses of its choices.

    python tools/kernel_times/online_quant_fit.py [sweep.json ...]
                                     [--steps 300] [--write]

online_quant_sweep.py makes the sweeps; times_fit.py describes the fit.
"""

from __future__ import annotations

from online_quant_sweep import name_of
from times_fit import MEASURED, Subject, main

SUBJECT = Subject(
    header="dispatch/online_quant_mm/costs.h",
    source="online_quant_times.cpp",
    places=(r"kMmaTimes\[\]\{.*?\n\};", r"kSm90Steps\[\]\[2\]\{.*?\n\};", r"double mma_power.*?\} kSm90Time;"),
    sweeps=(MEASURED / "online_quant_h100.json", MEASURED / "online_quant_h200.json"),
    name=name_of,
    # Only blocks of 128 are fitted. Kernels that a sweep left out are not candidates.
    takes=lambda row: row.get("group", 128) == 128,
    counts=lambda row, name: name in row["us"],
    lacks_constant=True,
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
