"""``epiloq bench``, and ``python -m epiloq.bench`` for environments without the command line's packages."""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args, get_origin, get_type_hints

import torch

from epiloq.bench.cases import SUITES, Case
from epiloq.bench.environment import describe, gpu_state
from epiloq.bench.floor import CEILINGS, measure_read_floor
from epiloq.bench.models.measure import run_plan
from epiloq.bench.models.plan import FORMS, MODES, SHAPES, Extras, Measured, Plan
from epiloq.bench.models.report import draw_models, table, write_json
from epiloq.bench.models.shares import draw_shares, shares_table
from epiloq.bench.operations import OPERATIONS, default_peers, expand
from epiloq.bench.peers.whole_models import PEERS as MODEL_PEERS
from epiloq.bench.plot import plot as draw
from epiloq.bench.report import Report, render
from epiloq.bench.runner import Bench
from epiloq.bench.timing import TIMERS, CudaTimer, cache_bytes
from epiloq.cli.output import STDOUT, display, suggestion
from epiloq.cli.progress import clock, time_left
from epiloq.files import why_in_no_folder, why_not_named, why_not_written

CACHES = ("int8", "fp8")
VARIANTS = list(dict.fromkeys(v for operation in OPERATIONS.values() for v in operation.variants))
PEERS = list(dict.fromkeys(name for operation in OPERATIONS.values() for name in operation.peers))


def option(text: str) -> Any:
    """Return the help text of an option, as a typer option if typer is installed."""
    try:
        import typer
    except ImportError:
        return text
    return typer.Option(help=text)


def bench(
    suite: Annotated[list[str] | None, option(f"Suites, repeatable: {', '.join(SUITES)}. [quick]")] = None,
    op: Annotated[list[str] | None, option(f"Only these operations: {', '.join(OPERATIONS)}.")] = None,
    variant: Annotated[list[str] | None, option(f"Instead of the suites' variants: {', '.join(VARIANTS)}.")] = None,
    m: Annotated[list[int] | None, option("Numbers of rows of A (M), instead of the suites'.")] = None,
    arch: Annotated[list[str] | None, option("Also time this architecture's kernels: sm75, ...")] = None,
    peer: Annotated[
        list[str] | None,
        option(f"Instead of the suites' peers: {', '.join(PEERS)}; with --model: {', '.join(MODEL_PEERS)}."),
    ] = None,
    device: Annotated[str, option("cpu or cuda[:INDEX]; by default cuda where there is one.")] = "",
    seed: Annotated[int, option("Seed of the random inputs.")] = 0,
    settle: Annotated[
        float | None,
        option("Warm-up milliseconds before each timing on a GPU; from 100 on, kernels run at their own clock. [8]"),
    ] = None,
    commit: Annotated[str, option("The commit to record if the package is not inside a checkout.")] = "",
    json: Annotated[Path | None, option("Write everything to FILE after every case; -: to standard output.")] = None,
    plot: Annotated[
        Path | None, option("Draw percent of floor and ratios to peers (.png or .svg; matplotlib).")
    ] = None,
    model: Annotated[
        str, option(f"A whole model instead of operations: a directory, or a shape: {', '.join(SHAPES)}.")
    ] = "",
    scheme: Annotated[list[str] | None, option("With --model: schemes, besides the 16-bit model. [w4a16-g128]")] = None,
    layers: Annotated[int, option("With --model and a shape: decoder layers, by default all.")] = 0,
    mode: Annotated[list[str] | None, option(f"With --model: {', '.join(MODES)}. [eager]")] = None,
    batch: Annotated[list[int] | None, option("With --model: sequences that are decoded together. [1]")] = None,
    head: Annotated[str, option("With --model: a scheme for the output head of quantised models.")] = "",
    cache: Annotated[str, option(f"With --model: their key-value cache in {' or '.join(CACHES)}.")] = "",
    ignore: Annotated[
        list[str] | None,
        option("With --model: layers that quantised models leave in floating point, as '*self_attn*'."),
    ] = None,
    shares: Annotated[int, option("With --model: list this many kernels of a decode step by share of time.")] = 0,
    context: Annotated[int, option("With --model: tokens in the cache before a decode step.")] = 512,
    prompt: Annotated[int, option("With --model: tokens of a prefill, by default those of --context.")] = 0,
    generate: Annotated[int, option("With --model: also time model.generate for this many new tokens.")] = 0,
    form: Annotated[
        list[str] | None, option(f"With --model: quantised models as they are, optimised: {', '.join(FORMS)}. [both]")
    ] = None,
) -> None:
    """Time the operations and their peers, check the results, and compare times with the roofline floor.

    With --model: time prefill and decode of a language model, quantised and optimised, and compare with 16 bits.

    Exit codes: 1 when a result is wrong, 2 when an option is.
    """
    if model:
        schemes, modes, batches = scheme or ["w4a16-g128"], mode or ["eager"], batch or [1]
        plan = Plan(model, schemes, modes, batches, context, layers or None, shares=shares > 0)
        options: dict[str, Any] = {
            "head": head or None,
            "cache": cache or None,
            "peers": peer or (),
            "ignore": ignore or (),
        }
        options |= {"prompt": prompt or None, "generate": generate or None, "forms": form or tuple(FORMS)}
        return _bench_model(replace(plan, **options), device, json, plot, shares)
    try:
        for name, given, known in (("suite", suite, SUITES), ("op", op, OPERATIONS), ("variant", variant, VARIANTS)):
            _check_names(name, given, known)
        _check_names("peer", peer, PEERS)
        _check_counts(m=m or [1])
        target = _device(device)
        _check_settle(target, settle)
        suites = suite or ["quick"]
        cases = expand(suites, op or (), variant or (), m or ())
        _check_targets(json, plot)
        if not cases:
            raise ValueError("bench: expected at least one case, got options that select none")
    except ValueError as error:
        print(f"epiloq {error}", file=sys.stderr)
        raise SystemExit(2) from None
    archs, peers = ("auto", *(arch or ())), peer or default_peers(suites)
    report = _measure(target, settle, cases, seed, archs, peers, commit, json)
    print(render(report), file=sys.stderr if json == STDOUT else sys.stdout)
    if plot and any(row.status == "ok" for row in report.rows):
        facts = report.environment
        draw(report.rows, plot, f"{facts.get('gpu', 'CPU')}, torch {facts['torch']}, {facts['date']}")
    if report.failed:
        print(f"epiloq bench: {len(report.failed)} of {len(report.rows)} rows FAILED", file=sys.stderr)
        raise SystemExit(1)


def _bench_model(plan: Plan, device: str, json: Path | None, plot: Path | None, shares: int) -> None:
    try:
        _check_plan(plan)
        if shares < 0:
            raise ValueError(f"bench: --shares: expected at least 0, got {shares}")
        target = _device(device)
        _check_targets(json, plot, plan.model)
        _check_counts(layers=[plan.layers or 1], batch=plan.batches, context=[plan.context], prompt=[plan.prompt or 1])
        _check_counts(generate=[plan.generate or 1])
        if find_spec("transformers") is None:
            raise ValueError("bench: --model: expected transformers to be installed (pip install transformers)")
        extras, environment = Extras(), describe(target, "")
        environment["transformers"] = version("transformers")

        def keep(results: Sequence[Measured]) -> None:
            if json and json != STDOUT:
                write_json(json, environment, results, extras)

        results = run_plan(plan, target.type, _progress, extras, keep)
    except ValueError as error:
        print(f"epiloq {error}", file=sys.stderr)
        raise SystemExit(2) from None
    _print_models(results, extras, shares, sys.stderr if json == STDOUT else sys.stdout)
    if json == STDOUT:
        write_json(STDOUT, environment, results, extras)
    if plot:
        draw_models(results, plot)
    if plot and extras.shares:
        draw_shares(extras.shares, shares, plot.with_stem(f"{plot.stem}_shares"))


def _check_plan(plan: Plan) -> None:
    from epiloq import schemes

    ready = [name for name in schemes.available() if not schemes.SCHEMES[name].static]
    _check_names("scheme", plan.schemes, ready)
    _check_names("head", [plan.head] if plan.head else (), ready)
    _check_names("cache", [plan.cache] if plan.cache else (), CACHES)
    _check_names("peer", plan.peers, MODEL_PEERS)
    _check_names("mode", plan.modes, MODES)
    _check_names("form", plan.forms, FORMS)


def _check_counts(**counts: Sequence[int]) -> None:
    for name, numbers in counts.items():
        if min(numbers) < 1:
            raise ValueError(f"bench: --{name}: expected at least 1, got {min(numbers)}")


def _print_models(results: Sequence[Measured], extras: Extras, shares: int, to: TextIO) -> None:
    print(table(results), file=to)
    for name, reason in extras.left_out.items():
        print(f"{name} is left out: {reason}", file=to)
    if extras.shares:
        print("\n" + shares_table(extras.shares, shares), file=to)


def _check_names(option_name: str, given: Sequence[str] | None, known: Collection[str]) -> None:
    for name in given or ():
        if name not in known:
            raise ValueError(
                f"bench: --{option_name}: expected one of {', '.join(known)}, got {name!r}{suggestion(name, known)}"
            )


def _check_targets(json: Path | None, plot: Path | None, model: str = "") -> None:
    for name, path in (("json", json), ("plot", plot)):
        if path is None or (path == STDOUT and name == "json"):
            continue
        reason = why_not_named(path) or why_in_no_folder(path)
        if reason is not None:
            raise ValueError(f"bench: --{name}: {path}: {reason}")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"bench: --{name}: expected a file in a folder that exists, got {path}")
        reason = why_not_written(path, [model])
        if reason is not None:
            raise ValueError(f"bench: --{name}: {path}: {reason}")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise ValueError(f"bench: --plot: expected a name that ends in .png or .svg, got {plot}")
    if plot is not None and find_spec("matplotlib") is None:
        raise ValueError("bench: --plot: expected matplotlib to be installed (pip install matplotlib)")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"bench: --device: expected cpu or cuda[:INDEX], got {name!r}") from error
    if device.type not in TIMERS or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"bench: --device: expected a device of this machine, got {name!r}")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _check_settle(device: torch.device, ms: float | None) -> None:
    if ms is not None and (device.type != "cuda" or not 1 <= ms <= 1000):
        raise ValueError(f"bench: --settle: expected 1 to 1000 milliseconds on a GPU, got {ms:g} on {device}")


def _progress(text: str) -> None:
    if not display.quiet:
        print(text, file=sys.stderr, flush=True)


def _measure(
    device: torch.device,
    settle_ms: float | None,
    cases: Sequence[Case],
    seed: int,
    archs: Sequence[str],
    peers: Sequence[str],
    commit: str,
    json: Path | None,
) -> Report:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    begin, short = time.monotonic(), TIMERS[device.type]()  # `short` times floors and host calls, one at a time
    timer = short if settle_ms is None else CudaTimer(settle_ms)
    environment = describe(device, commit) | {"seed": seed}
    _progress("read floor")
    floor = measure_read_floor(device, short)
    named = {OPERATIONS[case.operation].ceiling for case in cases} - {""}
    ceilings = {name: CEILINGS[name](device, short) for name in sorted(named)}
    generator = torch.Generator(device).manual_seed(seed)
    run = Bench(device, timer, floor, ceilings, OPERATIONS, generator, cache_bytes(device), archs, peers)
    report = Report(environment, floor, ceilings, host=list(run.host_times(cases)))
    first = time.monotonic()
    for index, case in enumerate(cases):
        rest = f", about {clock(time_left(index, len(cases), time.monotonic() - first))} left" if index else ""
        _progress(f"[{index + 1}/{len(cases)}] {case}{rest}")
        report.rows += run.run(case)
        if json and json != STDOUT:
            report.write(json)
    if device.type == "cuda":
        # The last kernels have just ended, so these are close to the clocks and the power under load.
        environment["state_at_end"] = gpu_state(device)
    environment["seconds"] = round(time.monotonic() - begin)
    if json:
        report.write(json)
    return report


def _parser() -> argparse.ArgumentParser:
    """Build an argument parser from the signature of :func:`bench`, as typer does."""
    parser = argparse.ArgumentParser(prog="python -m epiloq.bench", description=inspect.getdoc(bench))
    defaults = inspect.signature(bench).parameters
    for name, hint in get_type_hints(bench, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        kind, meta = get_args(hint)
        many = [inner for inner in get_args(kind) if get_origin(inner) is list]
        single = get_args(many[0])[0] if many else next((t for t in get_args(kind) if t is not type(None)), kind)
        text = getattr(meta, "help", meta)
        action = "append" if many else "store"
        parser.add_argument(f"--{name}", type=single, action=action, help=text, default=defaults[name].default)
    return parser


def main() -> None:
    bench(**vars(_parser().parse_args()))
