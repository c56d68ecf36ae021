"""Kernels of a decode step by their share of its time, from torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epiloq.pages import figures


@dataclass(frozen=True)
class Share:
    """One kernel (on a CPU, one torch operation) of a contender's decode step: its share of the device time, which is
    `us` microseconds in total, and its number of calls."""

    contender: str
    kernel: str
    share: float
    calls: int
    us: float


def profiled(contender: str, run: Callable[[], object], device: str) -> list[Share]:
    """Profile one call of `run`, which must be warm; kernels with the largest share first, shares sum to 1."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = device == "cuda"
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        run()
        if on_gpu:
            torch.cuda.synchronize()

    def spent(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    events = [event for event in profile.key_averages() if spent(event) > 0]
    total = sum(map(spent, events)) or 1.0
    found = [Share(contender, event.key, spent(event) / total, int(event.count), spent(event)) for event in events]
    return sorted(found, key=lambda share: -share.share)


def shares_table(shares: Sequence[Share], most: int) -> str:
    """A line for each of the largest kernels of every contender, and one for the rest of them."""
    lines = [f"{'share of a decode step':24}{'%':>7}{'calls':>7}  kernel"]
    for contender in dict.fromkeys(share.contender for share in shares):
        own = [share for share in shares if share.contender == contender]
        for share in own[:most]:
            lines.append(f"{contender:24}{100 * share.share:7.1f}{share.calls:7}  {share.kernel[:90]}")
        if own[most:]:
            rest, calls = sum(share.share for share in own[most:]), sum(share.calls for share in own[most:])
            lines.append(f"{contender:24}{100 * rest:7.1f}{calls:7}  {len(own) - most} others")
    return "\n".join(lines)


def draw_shares(shares: Sequence[Share], most: int, path: Path) -> None:
    """Draw a bar per contender, divided by its largest kernels. Needs matplotlib."""
    from matplotlib.figure import Figure

    contenders = list(dict.fromkeys(share.contender for share in shares))
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(contenders) + 0.16 * most * len(contenders)), layout="constrained")
    axes = figure.subplots()
    for row, contender in enumerate(contenders):
        left = 0.0
        for share in [share for share in shares if share.contender == contender][:most]:
            axes.barh(
                row, 100 * share.share, left=100 * left, edgecolor="white", label=f"{contender}: {share.kernel[:60]}"
            )
            left += share.share
        axes.barh(row, 100 * (1 - left), left=100 * left, color="lightgrey")
    axes.set_yticks(range(len(contenders)), contenders)
    axes.invert_yaxis()
    axes.set_xlabel("% of a decode step (grey: the rest)")
    figure.legend(loc="outside lower center", fontsize=6, ncols=2)
    figures.save(figure, path)
