"""Prefill, decode and memory of a language model, quantised and optimised, compared with its 16-bit original.

Weights are random by default, since speed does not depend on values; a model directory works too. Each contender is
measured alone, in eager torch, in a CUDA graph of eager torch, or compiled.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import nan
from statistics import median
from typing import Any

import torch

import epiloq
from epiloq.bench.contract import Unavailable
from epiloq.bench.models.contenders import build, prepare, reason_of
from epiloq.bench.models.plan import FORMS, Extras, Measured, Plan
from epiloq.bench.models.shares import Share, profiled
from epiloq.bench.peers.whole_models import PEERS
from epiloq.models.cache_argument import cache_argument

_REPEATS = {"cuda": 15, "cpu": 3}
# Calls that are queued on a GPU at a time: while tokens are generated, the host is ahead, and launching a graph takes
# the GPU no time.
_QUEUED = 8
_CALLS = 3  # of generate, each of many steps
LOOPS = ("generate", "own loop")
"""Phases that call ``model.generate``: with transformers' decoding loop, and with `epiloq.decode`."""


def _timed(run: Callable[[], object], device: str, repeats: int, queued: int = _QUEUED) -> float:
    """Median milliseconds of a call; on a GPU of `queued` calls, by CUDA events."""
    times = []
    for _ in range(repeats):
        if device == "cpu":
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(queued):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / queued)
    return median(times)


def _step(
    model: Any, mode: str, batch: int, context: int, kind: str | None = None
) -> tuple[Callable[[], object], Callable[[], None]]:
    """Return a decode step after `context` tokens, and a function that restores the cache."""
    from transformers import StaticCache

    device, name = model.device, cache_argument(model)
    length = context + 256
    cache: Any = StaticCache(config=model.config, max_cache_len=length)
    if kind is not None:
        cache = epiloq.QuantizedCache(model.config, kind, length)
    tokens = torch.randint(model.config.vocab_size, (batch, context), device=device)
    model(tokens, use_cache=True, logits_to_keep=1, **{name: cache})
    token = tokens[:, :1].clone()

    def reset() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)

    called = torch.compile(model, fullgraph=True) if mode == "compile" else model
    return lambda: called(token, use_cache=True, **{name: cache}), reset


def _generation(
    model: Any, mode: str, batch: int, context: int, new: int, kind: str | None, loop: Callable[..., Any] | None = None
) -> Callable[[], object]:
    """Return a call of ``model.generate`` for `new` tokens after `context` tokens, by its own decoding loop or `loop`.

    With ``mode="compile"`` the cache has a fixed size, for which transformers compiles the decode step on a GPU.
    """
    ids = torch.randint(model.config.vocab_size, (batch, context), device=model.device)
    model.generation_config.eos_token_id = None  # no sequence ends early
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    if loop is not None:
        options["custom_generate"] = loop
    length = context + new if mode == "compile" else None

    def run() -> object:
        if kind is not None:
            quantized = {cache_argument(model): epiloq.QuantizedCache(model.config, kind, length)}
            return model.generate(ids, **options, **quantized)
        if length is None:
            options["cache_implementation"] = "dynamic"
        elif loop is None:  # `decode` makes one of fixed size, and keeps it
            options["cache_implementation"] = "static"
        return model.generate(ids, **options)

    return run


def _replayed(run: Callable[[], object]) -> Callable[[], object]:
    """Capture `run` in a CUDA graph and return its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay(_: object = kept) -> None:
        graph.replay()

    return replay


@contextmanager
def _settled() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        yield


def _nothing() -> None:
    pass


def measure(
    model: Any, scheme: str, optimized: bool, mode: str, phase: str, batch: int, tokens: int, cache: str | None = None
) -> Measured:
    """Measure prefill of ``[batch, tokens]`` into a new cache, or a decode step after `tokens` in a static one."""
    device = model.device.type
    repeats, layers = _REPEATS[device], model.config.num_hidden_layers
    with _settled():
        if phase == "prefill":
            ids = torch.randint(model.config.vocab_size, (batch, tokens), device=model.device)
            called = torch.compile(model, fullgraph=True) if mode == "compile" else model

            def run() -> object:
                return called(ids, use_cache=True, logits_to_keep=1)

            reset = _nothing
        else:
            run, reset = _step(model, mode, batch, tokens, cache)
        run()  # compiles
        replays = mode != "eager" and device == "cuda"
        reset()
        whole = _timed(_replayed(run) if replays else run, device, repeats)
        memory = _memory(model)
        if mode == "compile" or layers == 1:
            more, rest = layers, _timed(_outside(model, batch, 1 if phase == "decode" else tokens), device, repeats)
        else:
            with _first_layer(model):
                run(), reset()
                more, rest = layers - 1, _timed(_replayed(run) if replays else run, device, repeats)
    count = batch * (tokens if phase == "prefill" else 1)
    a_layer = 1e3 * max(whole - rest, 0) / more
    figures = (whole, 1e3 * count / whole, a_layer, *memory)
    return Measured(scheme, optimized, mode, phase, batch, tokens, *figures, cache=cache)


def measure_generate(
    model: Any,
    scheme: str,
    optimized: bool,
    mode: str,
    batch: int,
    context: int,
    new: int,
    cache: str | None = None,
    phase: str = "generate",
) -> Measured:
    """Measure ``model.generate``: `new` tokens for each of `batch` sequences of `context` tokens, prompt included.

    With ``phase="own loop"`` `epiloq.decode` is its decoding loop.
    """
    with _settled():
        run = _generation(model, mode, batch, context, new, cache, epiloq.decode if phase == "own loop" else None)
        run(), run()  # compiles, and on a GPU captures
        whole = _timed(run, model.device.type, _CALLS, 1)
        figures = (whole, 1e3 * batch * new / whole, nan, *_memory(model))
    return Measured(scheme, optimized, mode, phase, batch, new, *figures, cache=cache)


def _memory(model: Any) -> tuple[float, float, int, float]:
    """Megabytes of weights and of the peak, number of layers, and megabytes of the weights of one."""
    layers = model.config.num_hidden_layers
    weights, of_layers = (sum(p.nbytes for p in each.parameters()) / 1e6 for each in (model, model.model.layers))
    peak = torch.cuda.max_memory_allocated() / 1e6 if model.device.type == "cuda" else 0.0
    return weights, peak, layers, of_layers / layers


@contextmanager
def _first_layer(model: Any) -> Iterator[None]:
    """Reduce the model to its first layer; in an eager step the work around the layers takes as long as several."""
    config, decoder = model.config, model.model
    number, layers = config.num_hidden_layers, decoder.layers
    config.num_hidden_layers, decoder.layers = 1, layers[:1]
    try:
        yield
    finally:
        config.num_hidden_layers, decoder.layers = number, layers


def _outside(model: Any, batch: int, tokens: int) -> Callable[[], object]:
    """Return a call of embedding, last norm and head alone; on a GPU, as a CUDA graph."""
    ids = torch.randint(model.config.vocab_size, (batch, tokens), device=model.device)

    def run() -> object:
        hidden = model.model.norm(model.model.embed_tokens(ids))
        return model.lm_head(hidden[:, -1:])

    return _replayed(run) if model.device.type == "cuda" else run


def run_plan(
    plan: Plan,
    device: str,
    progress: Callable[[str], None],
    extras: Extras | None = None,
    keep: Callable[[list[Measured]], None] = lambda _: None,
) -> list[Measured]:
    """Measure every contender of a plan, the 16-bit model first.

    `progress` receives a line per contender, `keep` all results so far after each one, and `extras` is filled in. A
    peer that fails while it is quantised or measured is left out from there on, with the reason.
    """
    extras = Extras() if extras is None else extras
    results: list[Measured] = []
    quantised = [(scheme, FORMS[form]) for scheme in plan.schemes for form in plan.forms]
    contenders = [("none", False), *quantised]
    for scheme, optimized in (*contenders, *((peer, False) for peer in plan.peers)):
        model = build(plan.model, plan.layers, torch.bfloat16, device)
        now = "quantising"

        def tell(what: str, name: str = _name(scheme, optimized)) -> None:
            nonlocal now
            now = what
            progress(f"{name}, {what}")

        try:
            model = prepare(model, scheme, optimized, plan.head, plan.ignore)
            for row in _measured(plan, model, scheme, optimized, tell):
                results.append(row)
            if plan.shares:
                tell("share of time")
                extras.shares += _shares(plan, model, scheme, optimized)
        except Exception as error:
            if scheme not in PEERS:
                raise
            reason = str(error) if isinstance(error, Unavailable) else f"{now}: {reason_of(error)}"
            extras.left_out[scheme] = reason
            progress(f"{scheme} is left out: {reason}")
        keep(results)
        del model
    return results


def _name(scheme: str, optimized: bool) -> str:
    return scheme + (" optimised" if optimized else "")


def _cache_of(plan: Plan, scheme: str) -> str | None:
    """The type of the cache of a contender: that of the plan, for our own quantised ones."""
    return plan.cache if scheme != "none" and scheme not in PEERS else None


def _measured(plan: Plan, model: Any, scheme: str, optimized: bool, tell: Callable[[str], None]) -> Iterator[Measured]:
    """Measure a contender in each mode and phase; `tell` receives what comes next."""
    ours, cache = scheme != "none" and scheme not in PEERS, _cache_of(plan, scheme)
    of_ours: dict[str, Any] = {"head": plan.head, "ignore": tuple(plan.ignore)} if ours else {}
    for mode in plan.modes:
        prompt = plan.context if plan.prompt is None else plan.prompt
        phases = [("prefill", 1, prompt), *(("decode", batch, plan.context) for batch in plan.batches)]
        for phase, batch, tokens in phases:
            tell(f"{mode}, {phase}, batch {batch}")
            yield replace(measure(model, scheme, optimized, mode, phase, batch, tokens, cache), **of_ours)
        if plan.generate is None or mode == "graph":  # `generate` cannot use a captured step
            continue
        for batch in plan.batches:
            for loop in LOOPS:
                tell(f"{mode}, {loop}, batch {batch}")
                row = measure_generate(model, scheme, optimized, mode, batch, plan.context, plan.generate, cache, loop)
                yield replace(row, **of_ours)


def _shares(plan: Plan, model: Any, scheme: str, optimized: bool) -> list[Share]:
    mode = "compile" if "compile" in plan.modes else "eager"
    cache = _cache_of(plan, scheme)
    return step_shares(model, _name(scheme, optimized), mode, plan.batches[0], plan.context, cache)


def step_shares(model: Any, name: str, mode: str, batch: int, tokens: int, cache: str | None = None) -> list[Share]:
    """Kernels of one decode step by their share of the time, largest first."""
    with _settled():
        run, reset = _step(model, mode, batch, tokens, cache)
        for _ in range(2):
            run()
        reset()
        return profiled(name, run, model.device.type)
