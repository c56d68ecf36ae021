"""The settings and data that decide a run's result: to resume a run, and to compare its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq.environment import arithmetic
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.quantize.calibration.joining import fingerprint
from epiloq.quantize.plan import Plan
from epiloq.quantize.settings import Settings


def identity_of(settings: Settings, source: Checkpoint, plan: Plan, texts: Sequence[Tensor]) -> dict[str, Any]:
    """Everything that decides the values of a finished block, except the grid."""
    digest = hashlib.sha256()
    for window in texts:
        digest.update(window.numpy().tobytes() + b"|")
    files = sorted({"config.json", *source.files.values()})
    stats = {file: (settings.model / file).stat() for file in files}
    return {
        "epiloq": epiloq.__version__,
        "model": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()},
        "scheme": settings.scheme,
        "algorithm": settings.algorithm,
        "alpha": settings.alpha,
        "slices": settings.slices,
        "keep_dynamic": settings.keep_dynamic,
        "budget": None if settings.budget is None else asdict(settings.budget),
        "blocks": list(plan.lists),
        "layers in floating point": sorted(plan.left),
        "rotation": settings.seed if settings.rotate else None,
        "tokens": digest.hexdigest(),
        "torch": torch.__version__,
    }


def facts(settings: Settings, identity: dict[str, Any], source: Checkpoint, grid: object) -> dict[str, Any]:
    """Everything that must be equal on all ranks, by its name in messages."""
    same = {key: value for key, value in identity.items() if key != "model"}
    options = {key: value for key, value in asdict(settings).items() if key not in ("model", "device", "command")}
    model = fingerprint(settings.model, {"config.json", *source.files.values()})
    return {**same, "model": model, "options": repr(options), "grid": repr(grid), **arithmetic(settings.device)}
