"""A whole language model: prefill, decode and memory, quantised and optimised beside its 16-bit self.

Random weights of a known shape by default, for speed does not depend on values; a directory works too. Each contender
is measured alone, in eager torch, in a CUDA graph of eager torch, or compiled.
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import epiloq
from epiloq.bench.contract import Unavailable
from epiloq.bench.peers.whole_models import PEERS
from epiloq.bench.shares import Share, profiled
from epiloq.cli import output

SHAPES: dict[str, dict[str, int]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    },
    "llama-3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    },
}
MODES = ("eager", "graph", "compile")
_REPEATS = {"cuda": 30, "cpu": 3}


@dataclass(frozen=True)
class Measured:
    """One contender's figures. Times are medians; `us_a_layer` leaves the embedding, last norm and head out."""

    scheme: str  # or the name of a peer
    optimized: bool
    mode: str
    phase: str  # "prefill" or "decode"
    batch: int
    tokens: int
    milliseconds: float
    tokens_per_second: float
    us_a_layer: float
    weight_megabytes: float
    peak_megabytes: float


@dataclass(frozen=True)
class Plan:
    """A model by each scheme, in each mode: a prefill of `context` tokens, and decode behind as many."""

    model: str
    schemes: Sequence[str]
    modes: Sequence[str]
    batches: Sequence[int]
    context: int
    layers: int | None = None
    head: str | None = None
    """A scheme for the output head of every quantised model (and the embedding that it is tied to)."""
    cache: str | None = None
    """The type of a quantised key-value cache, "int8" or "fp8", of every quantised model."""
    peers: Sequence[str] = ()
    """Other packages' models, keys of `whole_models.PEERS`."""
    shares: bool = False
    """Whether a step of decode is profiled."""


@dataclass
class Beside:
    """What a run gives beside its figures: why peers were left out, and where the time of a step goes."""

    left_out: dict[str, str] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)


def build(model: str | Path, layers: int | None, dtype: torch.dtype, device: str) -> Any:
    """The model of a shape's name, with random weights, or of a directory, in eval mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if str(model) not in SHAPES:
        if not Path(model).is_dir():
            raise ValueError(f"bench: --model: expected a directory or one of {', '.join(SHAPES)}, got {str(model)!r}")
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        return loaded.to(device).eval()
    sizes: dict[str, Any] = SHAPES[str(model)] | ({} if layers is None else {"num_hidden_layers": layers})
    with torch.device(device):
        made: Any = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=8192))
    return made.to(dtype).eval()


def prepare(model: nn.Module, scheme: str, optimized: bool, head: str | None = None) -> nn.Module:
    """The model quantised by `scheme`, unless that is "none", and optimised; or another package's of that name.

    Raises Unavailable for a package that is not installed, or cannot.
    """
    if scheme in PEERS:
        try:
            return PEERS[scheme](model)
        except (ImportError, NotImplementedError, RuntimeError, AttributeError) as error:
            raise Unavailable(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    if scheme != "none":
        epiloq.quantize_(model, scheme, head=head)
        if optimized:
            epiloq.optimize_(model)
    return model


def _timed(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median milliseconds of a call, on the GPU's own clock where there is one."""
    times = []
    for _ in range(repeats):
        if device == "cpu":
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def _cache_argument(model: nn.Module) -> str:
    """What this version of transformers calls the cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _step(
    model: Any, mode: str, batch: int, context: int, kind: str | None = None
) -> tuple[Callable[[], object], Callable[[], None]]:
    """One step of decode behind `context` tokens, and what puts the cache back."""
    from transformers import StaticCache

    device, name = model.device, _cache_argument(model)
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


def _replayed(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as the replay of a CUDA graph."""
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
    """Figures of one phase: prefill of ``[batch, tokens]``, or a step of decode behind `tokens` in a static cache."""
    device = model.device.type
    repeats, layers = _REPEATS[device], model.config.num_hidden_layers
    with _settled():
        if phase == "prefill":
            ids = torch.randint(model.config.vocab_size, (batch, tokens), device=model.device)
            called = torch.compile(model, fullgraph=True) if mode == "compile" else model

            def run() -> object:
                return called(ids, use_cache=False, logits_to_keep=1)

            reset = _nothing
        else:
            run, reset = _step(model, mode, batch, tokens, cache)
        run()  # which compiles
        timed = _replayed(run) if mode != "eager" and device == "cuda" else run
        reset()
        whole = _timed(timed, device, repeats)
        weights = sum(p.nbytes for p in model.parameters()) / 1e6
        peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else 0.0
        rest = _timed(_outside(model, batch, 1 if phase == "decode" else tokens), device, repeats)
    count = batch * (tokens if phase == "prefill" else 1)
    a_layer = 1e3 * max(whole - rest, 0) / layers
    return Measured(scheme, optimized, mode, phase, batch, tokens, whole, 1e3 * count / whole, a_layer, weights, peak)


def _outside(model: Any, batch: int, tokens: int) -> Callable[[], object]:
    """Embedding, last norm and head, as a graph where there is a GPU."""
    ids = torch.randint(model.config.vocab_size, (batch, tokens), device=model.device)

    def run() -> object:
        hidden = model.model.norm(model.model.embed_tokens(ids))
        return model.lm_head(hidden[:, -1:])

    return _replayed(run) if model.device.type == "cuda" else run


def run_plan(plan: Plan, device: str, progress: Callable[[str], None], beside: Beside | None = None) -> list[Measured]:
    """Every contender of a plan, the 16-bit model first; `progress` is told of each, `beside` filled."""
    beside = Beside() if beside is None else beside
    results = []
    contenders = [("none", False)] + [(scheme, optimized) for scheme in plan.schemes for optimized in (False, True)]
    for scheme, optimized in (*contenders, *((peer, False) for peer in plan.peers)):
        ours = scheme != "none" and scheme not in PEERS
        model = build(plan.model, plan.layers, torch.bfloat16, device)
        try:
            model = prepare(model, scheme, optimized, plan.head)
        except Unavailable as error:
            beside.left_out[scheme] = str(error)
            progress(f"{scheme} is left out: {error}")
            continue
        cache = plan.cache if ours else None
        for mode in plan.modes:
            for phase, batches in (("prefill", [1]), ("decode", plan.batches)):
                for batch in batches:
                    progress(f"{scheme}{' optimised' if optimized else ''}, {mode}, {phase}, batch {batch}")
                    results.append(measure(model, scheme, optimized, mode, phase, batch, plan.context, cache))
        if plan.shares:
            progress(f"{scheme}{' optimised' if optimized else ''}: share of time")
            name = scheme + (" optimised" if optimized else "")
            beside.shares += step_shares(model, name, plan.batches[0], plan.context, cache)
        del model
    return results


def step_shares(model: Any, name: str, batch: int, tokens: int, cache: str | None = None) -> list[Share]:
    """Kernels of one step of decode in eager torch by their share of the time, largest first."""
    with _settled():
        run, reset = _step(model, "eager", batch, tokens, cache)
        run()
        reset()
        return profiled(name, run, model.device.type)


def write_json(
    path: Path, environment: Mapping[str, Any], results: Sequence[Measured], beside: Beside | None = None
) -> None:
    """The environment, a row a result, what was left out and the shares of time."""
    found = {"environment": dict(environment), "rows": [asdict(r) for r in results]}
    output.write_json(path, found | asdict(Beside() if beside is None else beside))


def draw_models(results: Sequence[Measured], path: Path) -> None:
    """Tokens per second by contender, a panel for each mode, phase and batch. Needs matplotlib."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((r.mode, r.phase, r.batch) for r in results))
    figure = Figure(figsize=(3.2 * len(panels) + 1.6, 3.4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows = [r for r in results if (r.mode, r.phase, r.batch) == panel]
        axes.barh([_label(r) for r in rows], [r.tokens_per_second for r in rows], color="tab:blue")
        axes.invert_yaxis()
        axes.set_title(f"{panel[1]}, batch {panel[2]}, {panel[0]}", fontsize=9)
        axes.set_xlabel("tokens/s")
    figure.savefig(path, dpi=110)


def _label(result: Measured) -> str:
    return result.scheme + (" optimised" if result.optimized else "")


def table(results: Sequence[Measured]) -> str:
    """A line a result, each beside the 16-bit model in the same mode, phase and batch."""
    base = {(r.mode, r.phase, r.batch): r.milliseconds for r in results if r.scheme == "none"}
    lines = [f"{'scheme':22}{'mode':9}{'phase':9}{'batch':>6}{'ms':>10}{'tokens/s':>11}{'us/layer':>10}{'MB':>9}  x"]
    for r in results:
        own = base.get((r.mode, r.phase, r.batch))
        ratio = "" if own is None else f"{own / r.milliseconds:.2f}"
        lines.append(
            f"{_label(r):22}{r.mode:9}{r.phase:9}{r.batch:6}{r.milliseconds:10.3f}{r.tokens_per_second:11.0f}"
            f"{r.us_a_layer:10.1f}{r.weight_megabytes:9.0f}  {ratio}"
        )
    return "\n".join(lines)
