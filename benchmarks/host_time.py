"""Host time of eager calls: what a layer, and a decode step, cost before any kernel matters.

    python benchmarks/host_time.py                                # on the GPU where there is one
    python benchmarks/host_time.py --beside ../other/python       # and the same of another built checkout

Layers have one token, 128 input and 64 output features, like a `torch.nn.Linear` in the same type. Models have the form
of Llama with 128 hidden features and a static cache: the time of a layer is the difference between a model of two and
one of six, and the rest of a step is what two layers leave. The lowest of many short rounds counts, because other work
only adds time: of wall-clock time on a GPU, which is not waited for, and of the thread's own time on a CPU, where sizes
are so small that kernels take little of it. With --beside, both checkouts are measured in turn, in processes of their
own.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCHEMES = (
    *("w4a16-g32", "w8a16", "fp8-token", "w8a8-int8", "fp8-block", "w4a8-fp8", "w4a8-int8", "w4a16-nvfp4"),
    *("w4a8-mxfp4-fp8", "w4a8-nvfp4-fp8"),
)
FEWEST, MOST = 2, 6


def rounds(call: Callable[[], object], seconds: float) -> float:
    """The lowest time of a call, in microseconds, over rounds of about a millisecond."""
    import torch

    is_cuda = torch.cuda.is_available()
    wait, clock = (torch.cuda.synchronize, time.perf_counter) if is_cuda else (lambda: None, time.thread_time)
    call()
    start = clock()
    call()
    count = max(1, int(1e-3 / max(clock() - start, 1e-7)))
    lowest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        wait()
        start = clock()
        for _ in range(count):
            call()
        lowest = min(lowest, (clock() - start) / count)
    return 1e6 * lowest


def layers(seconds: float) -> Iterator[tuple[str, float]]:
    """A name and the microseconds of one call, for torch's layer and each scheme's."""
    import torch
    from torch import nn

    import epiloq

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    x = torch.randn(1, 128, dtype=dtype, device=device)
    for scheme in ("float", *SCHEMES):
        layer = nn.Sequential(nn.Linear(128, 64, bias=False, dtype=dtype, device=device)).eval()
        if scheme != "float":
            epiloq.quantize_(layer, scheme)
        with torch.inference_mode():
            yield f"layer {scheme}", rounds(lambda layer=layer[0]: layer(x), seconds)  # type: ignore[misc]


def models(seconds: float) -> Iterator[tuple[str, float]]:
    """Microseconds of a decode step, by layer and for the rest, as loaded, quantised and optimised."""
    for scheme in ("float", "w4a16-g32", "fp8-token", "w8a8-int8", "w4a8-fp8"):
        for optimised in (False, True) if scheme != "float" else (False,):
            few, many = (rounds(_step(scheme, optimised, count), seconds) for count in (FEWEST, MOST))
            a_layer = (many - few) / (MOST - FEWEST)
            name = f"{scheme}{' optimised' if optimised else ''}"
            yield f"decoder layer {name}", a_layer
            yield f"rest of a step {name}", few - FEWEST * a_layer


def _step(scheme: str, optimised: bool, count: int) -> Callable[[], Any]:
    import torch
    import transformers

    import epiloq

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=96, num_hidden_layers=count)
    model = transformers.LlamaForCausalLM(config).to(device, dtype).eval()
    if scheme != "float":
        epiloq.quantize_(model, scheme)
    if optimised:
        epiloq.optimize_(model)
    cache = transformers.StaticCache(config=config, max_cache_len=16)
    held = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}
    token, place = torch.tensor([[3]], device=device), torch.tensor([[8]], device=device)

    @torch.inference_mode()
    def step() -> Any:
        for layer in cache.layers:  # so that it never is full
            if layer.is_initialized:
                layer.cumulative_length.fill_(8)
        return model(token, position_ids=place, use_cache=True, **held)

    return step


def measure(kinds: list[str], seconds: float) -> dict[str, float]:
    """Microseconds by name."""
    return {name: us for kind in kinds for name, us in {"layers": layers, "models": models}[kind](seconds)}


def beside(python: str, kinds: list[str], seconds: float) -> dict[str, float]:
    """`measure` in a process that imports epiloq from a folder."""
    command = [sys.executable, "-W", "ignore", __file__, "--json", "--seconds", str(seconds), *kinds]
    environment = {**os.environ, "PYTHONPATH": python}
    found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(found.stdout)
    return result


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["layers", "models"], help="layers, models or both")
    parser.add_argument("--beside", metavar="FOLDER", help="the folder of another epiloq package, to compare with")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a measurement, in each turn")
    parser.add_argument("--turns", type=int, default=3, help="with --beside")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(options.kinds, options.seconds)))
        return
    if options.beside is None:
        for name, us in measure(options.kinds, options.seconds).items():
            print(f"{name:40} {us:8.1f} us")
        return
    import epiloq

    folders = {"before": options.beside, "now": str(Path(epiloq.__file__).parents[1])}
    lowest: dict[str, dict[str, float]] = {"before": {}, "now": {}}
    for _ in range(options.turns):
        for side, folder in folders.items():
            for name, us in beside(folder, options.kinds, options.seconds).items():
                lowest[side][name] = min(us, lowest[side].get(name, us))
    print(f"{'':40} {'before':>8} {'now':>8}  now / before")
    for name, us in lowest["now"].items():
        before = lowest["before"][name]
        print(f"{name:40} {before:8.1f} {us:8.1f} {us / before:8.2f}")


if __name__ == "__main__":
    main()
