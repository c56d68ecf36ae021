"""End-to-end tuning as a stage of ``epiloq quantize``, after all blocks are quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from epiloq.formats.io.model import load_float
from epiloq.quantize.algorithms.tune import Inputs, Tuned, tune
from epiloq.quantize.calibration.work import Block
from epiloq.weights.grid import QuantizedWeight

if TYPE_CHECKING:
    from epiloq.quantize.calibration.store import Store
    from epiloq.quantize.calibration.tally import Tally
    from epiloq.quantize.job import Job

INPUTS: dict[str | None, Inputs | None] = {"int8": "int8", "int8-azp": "int8-azp", "int8-static": "int8-static"}
"""Activations that are rounded while scales are trained; others are taken as they are, as by GPTQ."""


def tuned(job: Job, store: Store, tally: Tally) -> Callable[[str], Block]:
    """Train scales and norms (the latter in place in the model); returns a function from a block's name to the
    finished block."""
    settings, device = job.settings, job.settings.device
    blocks = {name: block for name in tally.blocks if (block := store.read(name)) is not None}
    weights = {
        name: cast(QuantizedWeight, weight) for block in blocks.values() for name, weight in block.weights.items()
    }
    teacher = load_float(job.source).to(device)
    home = next(job.model.parameters()).device
    with _in_float32(job.model.to(device)), tally.timed("tune", settings.tune) as advance:
        found = tune(
            job.model,
            weights,
            teacher,
            job.texts.calibration,
            steps=settings.tune,
            inputs=INPUTS.get(job.target.activations),
            seed=settings.seed,
            advance=advance,
        )
        for name, value in found.norms.items():
            job.model.get_parameter(name).data.copy_(value)
    job.model.to(home)
    tally.tuning = {"steps": settings.tune, "kl_before": found.before, "kl_after": found.after}
    types = {name: parameter.dtype for name, parameter in job.model.named_parameters()}
    return {name: _changed(block, found, types) for name, block in blocks.items()}.__getitem__


def _changed(block: Block, found: Tuned, types: dict[str, torch.dtype]) -> Block:
    """A block with trained scales and norms."""
    state: dict[str, Any] = dict(block.state)
    for name, value in found.norms.items():
        own = name.removeprefix(f"{block.name}.")
        if own in state:
            state[own] = value.to(types[name]).cpu()
    return replace(block, weights={name: found.weights[name] for name in block.weights}, state=state)


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Temporarily convert a model's parameters to float32."""
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    model.float()
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(types[name])
