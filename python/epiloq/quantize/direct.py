"""Schemes that ``epiloq quantize`` applies layer by layer, as `quantize_` does: rounding, without compensation."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats import deepseek_fp8, epiloq_modules
from epiloq.formats.checkpoint import carry_over, written_whole
from epiloq.formats.comparison import layer_error
from epiloq.progress import Stage, unseen
from epiloq.quantize.job import Run, Settings, opened
from epiloq.quantize.smoothquant import smoothquant_
from epiloq.quantize.tally import Tally
from epiloq.schemes import default_filter, quantize_

ALGORITHMS = ("rtn", "smoothquant")
WRITERS = {"epiloq": epiloq_modules.write, "deepseek-fp8": deepseek_fp8.write}


def prepare(settings: Settings) -> Run:
    """Load what a run needs and check all that can be. Raises ValueError, with nothing on the disk touched.

    `settings` name a scheme of `quantize_` and a format that can say it.
    """
    if settings.algorithm not in ALGORITHMS:
        raise ValueError(
            f"the scheme {settings.scheme} takes {' or '.join(ALGORITHMS)}, got {settings.algorithm}: its weights lie "
            "on no integer grid whose errors others could make up for"
        )
    if settings.blocks is not None:
        raise ValueError(f"the scheme {settings.scheme} is rounded layer by layer, without blocks to name (--blocks)")
    run = opened(settings)
    if not _chosen(run.model):
        raise ValueError(f"{settings.model}: expected linear layers to quantise, found none")
    return run


def perform(run: Run, stage: Stage = unseen) -> dict[str, Any]:
    """Quantise, write, and report, as `job.perform` does.

    Raises ValueError, or OSError when the disk fails; nothing is left then.
    """
    start, settings, tally = time.perf_counter() - run.seconds, run.settings, Tally(stage)
    tally.seconds["load"] = run.seconds
    model = run.model.to(settings.device)
    before = run.perplexity(model, tally, "evaluate before")
    if run.texts:
        with tally.timed("smooth", len(run.texts)) as advance:
            smoothquant_(model, lambda m: _show(m, run.texts), alpha=settings.alpha)
            advance()
    chosen = _chosen(model)
    with tally.timed("quantise", len(chosen), f"{settings.scheme}, {settings.algorithm}: layers") as advance:
        for name in chosen:
            _quantise(model, name, settings.scheme, tally)
            advance()
    with written_whole(settings.output) as whole:
        with tally.timed("write", 1) as advance:
            WRITERS[settings.layout](model.cpu(), run.source.config, whole)
            carry_over(settings.model, whole)
            advance()
        return run.report(whole, tally, before, start)


def _chosen(model: nn.Module) -> list[str]:
    takes = default_filter(model)
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and takes(module, name)]


@torch.no_grad()
def _quantise(model: nn.Module, name: str, scheme: str, tally: Tally) -> None:
    linear = model.get_submodule(name)
    exact = linear.weight
    assert isinstance(exact, Tensor)
    quantize_(model, scheme, lambda module, _: module is linear)
    module = model.get_submodule(name)
    ((kind, options),) = epiloq_modules.layers_of(module).values()
    weight = epiloq_modules.KINDS[kind].weight(module, options)
    tally.errors[name] = layer_error(name, exact.float(), weight.dequantize()).relative
    tally.count(next(tensor for part, tensor in module.state_dict().items() if part.startswith("weight_scale")))


@torch.no_grad()
def _show(model: nn.Module, texts: list[Tensor]) -> None:
    device = next(model.parameters()).device
    for window in texts:
        model(window.to(device), use_cache=False)
