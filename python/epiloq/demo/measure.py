"""Measurements: the teacher in each floating-point dtype, then each scheme, on each device."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epiloq.demo import DemoError, speed, teacher, text
from epiloq.demo.layers import layer_errors, weight_bytes
from epiloq.demo.results import Measured, Results, Run
from epiloq.evaluation.perplexity import perplexity
from epiloq.progress import Advance, Stage

if TYPE_CHECKING:
    from torch import nn

BASELINE_DTYPE = "float32"
TEACHER_DTYPES = (BASELINE_DTYPE, "bfloat16")
# CUDA kernels write 16-bit outputs. The CPU also writes fp32, where quantisation is the only difference from the
# teacher, and bf16, the dtype to compare with on CPUs with AMX.
SCHEME_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}


@dataclass(frozen=True)
class Settings:
    """Settings of the demonstration. Headline figures are those of the first device."""

    name: str
    teacher: Path
    schemes: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    evaluation_tokens: int = 6 * text.WINDOW
    calibration_tokens: int = 8 * text.WINDOW


def cast(model: nn.Module, device: str, dtype: str) -> nn.Module:
    """Copy the model to a device and a floating-point dtype, given by torch's name for it."""
    import torch

    return copy.deepcopy(model).to(device=device, dtype=getattr(torch, dtype))


def measure_run(
    model: nn.Module, baseline: nn.Module, device: str, dtype: str, material: text.Text, advance: Advance
) -> Run:
    """Measure perplexity, bytes and speed of a model; it and the baseline are on `device` already."""
    found = perplexity(model, material.evaluation.windows, advance)
    speeds = speed.measure(model, baseline, material.evaluation.windows[0])
    advance()
    return Run(device, dtype, found, weight_bytes(model), speeds)


def quantise(model: nn.Module, scheme: str, material: text.Text, advance: Advance) -> nn.Module:
    """Quantise in place by a scheme, calibrated on the calibration part of the text if the scheme requires it."""
    import epiloq

    device = next(model.parameters()).device

    def calibrate(calibrated: nn.Module) -> None:
        for window in material.calibration.windows:
            calibrated(window.to(device), use_cache=False, logits_to_keep=1)

    try:
        quantised: nn.Module = epiloq.quantize_(model, scheme, calibrate=calibrate)
    except ValueError as error:
        raise DemoError(f"{scheme} cannot quantise this teacher: {error}") from error
    advance()
    return quantised


def measure_teacher(model: nn.Module, settings: Settings, material: text.Text, stage: Stage) -> Measured:
    """Measure the teacher in fp32 and bf16 on each device."""
    runs = []
    for device in settings.devices:
        baseline = model.to(device)
        for dtype in TEACHER_DTYPES:
            with stage(f"teacher {dtype} on {device}", len(material.evaluation.windows) + 1) as advance:
                measured = baseline if dtype == BASELINE_DTYPE else cast(model, device, dtype)
                runs.append(measure_run(measured, baseline, device, dtype, material, advance))
    return Measured("teacher", tuple(runs), {})


def measure_scheme(model: nn.Module, scheme: str, settings: Settings, material: text.Text, stage: Stage) -> Measured:
    """Measure one scheme on each device in each floating-point dtype, and its layers' errors in the first run."""
    runs: list[Run] = []
    errors: dict[str, float] = {}
    for device, dtype in ((place, dtype) for place in settings.devices for dtype in SCHEME_DTYPES[place]):
        baseline = model.to(device)
        with stage(f"{scheme} {dtype} on {device}", len(material.evaluation.windows) + 3) as advance:
            student = quantise(cast(model, device, dtype), scheme, material, advance)
            if not runs:
                errors = layer_errors(baseline, student, material.evaluation.windows[0])
            advance()
            runs.append(measure_run(student, baseline, device, dtype, material, advance))
    return Measured(scheme, tuple(runs), errors)


def describe_model(model: nn.Module, name: str) -> dict[str, Any]:
    """Return name and size of the teacher, JSON-ready."""
    return {
        "name": name,
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def measure(settings: Settings, environment: dict[str, Any], stage: Stage) -> Results:
    """Run all measurements of the settings. Raises DemoError if the teacher or the text cannot be used."""
    start = time.perf_counter()
    with stage("load the teacher", 1) as advance:
        model, tokenizer = teacher.load(settings.teacher)
        material = text.read(tokenizer, settings.evaluation_tokens, settings.calibration_tokens)
        advance()
    measured_teacher = measure_teacher(model, settings, material, stage)
    schemes = [measure_scheme(model, name, settings, material, stage) for name in settings.schemes]
    return Results(
        teacher=measured_teacher,
        schemes=tuple(schemes),
        model=describe_model(model, settings.name),
        text=material.describe(),
        environment=environment,
        seconds=time.perf_counter() - start,
    )
