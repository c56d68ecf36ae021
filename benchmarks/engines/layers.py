"""Times of single layers in vLLM, with vLLM's kernels and with epiloq's: experts, and linear layers.

    python benchmarks/engines/layers.py experts --kinds w4a16 nvfp4 int8 --sizes qwen3-30b-a3b mixtral-8x7b
    python benchmarks/engines/layers.py experts --kinds mxfp4 --sizes gpt-oss-20b
    python benchmarks/engines/layers.py linear --kinds nvfp4 w8a16-fp8 --sizes 28672x4096 4096x14336

Both contenders run in layers of vLLM's own classes with the same random weights. Experts' routing is given, but vLLM's
kernels for GPT-OSS choose the experts themselves. A CUDA graph has `CALLS` calls or more, with other tokens and experts
or layers each, so that most weights come from memory. Needs a GPU and vLLM; FlashInfer and DeepGEMM would run instead
of its own kernels. Prints one line of JSON for each number of tokens: microseconds of a call, and the relative
difference between the outputs of both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from random_checkpoints import KINDS, LAYERS_ALONE, MODELS, fill_weights, number_of_experts, quantisation, write_config
from torch import Tensor

VARIABLE = "EPILOQ_ENGINE_LAYERS"
CONTENDERS = {"vllm": "none", "epiloq": "all"}
CALLS = 16
REPLAYS = 20
WARM_UP = 0.3  # seconds
COLD_BYTES = 200_000_000  # of linear layers that follow each other: several times the L2 cache


class Experts(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    intermediate: int


def sizes_of(config: dict[str, Any]) -> Experts:
    intermediate = config.get("moe_intermediate_size") or config["intermediate_size"]
    return Experts(number_of_experts(config), config["num_experts_per_tok"], config["hidden_size"], intermediate)


EXPERTS = {name: sizes_of(config) for name, config in MODELS.items() if number_of_experts(config)}
OPTIONS: dict[str, dict[str, Any]] = {"gpt-oss-20b": {"has_bias": True, "activation": "swigluoai"}}
LINEAR = ("6144x4096", "4096x4096", "28672x4096", "4096x14336")
"""N x K: Llama-3-8B's."""


@contextmanager
def engine_config(dtype: torch.dtype = torch.bfloat16) -> Iterator[Any]:
    """vLLM's configuration and groups of ranks, for this process alone."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_open_port
    from vllm.v1.worker.workspace import init_workspace_manager

    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), "llama-3-8b", "fp8", {"num_hidden_layers": 1})
        arguments = EngineArgs(folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=1024)
        config = arguments.create_engine_config()
    default = torch.get_default_dtype()
    with set_current_vllm_config(config):
        address = f"tcp://127.0.0.1:{get_open_port()}"
        parallel_state.init_distributed_environment(1, 0, address, 0, "nccl" if torch.cuda.is_available() else "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device("cuda"))
        torch.set_default_dtype(dtype)
        try:
            yield config
        finally:
            torch.set_default_dtype(default)


def quantisation_config(kind: str) -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    settings = quantisation(kind, [])
    return get_quantization_config(settings["quant_method"]).from_config(settings)


def settled(layer: Any, seed: int) -> Any:
    """The layer with random weights, as after loading."""
    torch.manual_seed(seed)
    fill_weights(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def experts_layer(name: str, kind: str, device: str = "cuda", sizes: Experts | None = None) -> Any:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    experts, top_k, hidden, intermediate = sizes or EXPERTS[name]
    get_current_vllm_config().compilation_config.static_forward_context.clear()
    with torch.device(device):
        runner = FusedMoE(
            num_experts=experts,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=intermediate,
            quant_config=GptOssMxfp4Config() if kind == "mxfp4" else quantisation_config(kind),
            renormalize=True,
            prefix="model.layers.0.mlp.experts",
            **OPTIONS.get(name, {}),
        )
    return settled(runner.routed_experts, 0)


def linear_layers(n: int, k: int, kind: str, device: str = "cuda", count: int | None = None) -> list[Any]:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    found: list[Any] = []
    while len(found) < (count or 1):
        with torch.device(device):
            config = quantisation_config(kind)
            layer = ReplicatedLinear(k, n, bias=False, quant_config=config, prefix="model.layers.0.mlp.down_proj")
        size = sum(parameter.nbytes for parameter in layer.parameters())
        count = count or max(CALLS, -(-COLD_BYTES // size))
        found.append(settled(layer, len(found)))
    return found


Call = Callable[[], Tensor]


def experts_calls(layer: Any, sizes: Experts, tokens: int, device: str = "cuda") -> list[Call]:
    """With other inputs and scores each; of the best scores, weights that add up to 1."""
    torch.manual_seed(tokens)
    dtype = getattr(layer.quant_method, "topk_indices_dtype", None) or torch.int32

    def call() -> Call:
        x = torch.randn(tokens, sizes.hidden, device=device, dtype=torch.bfloat16)
        logits = torch.randn(tokens, sizes.experts, device=device, dtype=torch.bfloat16)
        best, ids = logits.float().topk(sizes.top_k)
        weights, ids = best.softmax(-1), ids.to(dtype)
        if layer.quant_method.is_monolithic:
            return lambda: layer.forward_monolithic(x, logits)
        return lambda: layer.forward_modular(x, weights, ids)

    return [call() for _ in range(CALLS)]


def linear_calls(layers: list[Any], k: int, tokens: int, device: str = "cuda") -> list[Call]:
    torch.manual_seed(tokens)

    def call(layer: Any) -> Call:
        x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
        return lambda: layer.quant_method.apply(layer, x)

    return [call(layer) for layer in layers]


def run(calls: list[Call], config: Any, tokens: int) -> list[Tensor]:
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config, num_tokens=tokens):
        return [call() for call in calls]


def time_of(calls: list[Call], config: Any, tokens: int) -> float:
    """Microseconds of a call within a CUDA graph: a median of eight rounds."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            run(calls, config, tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(calls, config, tokens)
    # Clocks may be low after weights were packed on the host.
    warm = time.perf_counter() + WARM_UP
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / (REPLAYS * len(calls)))
    return statistics.median(times)


def kernels_of(layer: Any) -> str:
    """What runs the layer: epiloq's kind, or vLLM's class and its choice of kernels."""
    method = layer.quant_method
    if hasattr(layer, "epiloq"):
        return f"epiloq {method.epiloq.kind}"
    kernel = getattr(getattr(layer, "scheme", None), "kernel", None) or getattr(method, "fp8_linear", None)
    backends = [
        str(getattr(value, "name", value))
        for key, value in vars(method).items()
        if key.endswith("backend") and value is not None
    ]
    return " ".join([type(method).__name__, *([] if kernel is None else [type(kernel).__name__]), *backends])


def relative_difference(exact: list[Tensor], found: list[Tensor]) -> float:
    return float((torch.cat(exact) - torch.cat(found)).norm() / torch.cat(exact).norm())


class Contest(NamedTuple):
    """A layer to measure: how its calls are made for a number of tokens, and what runs them."""

    kernels: str
    calls: Callable[[int], list[Call]]


def made(layers: str, sizes: str, kind: str) -> Contest:
    if layers == "experts":
        layer = experts_layer(sizes, kind)
        return Contest(kernels_of(layer), lambda tokens: experts_calls(layer, EXPERTS[sizes], tokens))
    n, k = map(int, sizes.split("x"))
    found = linear_layers(n, k, kind)
    return Contest(kernels_of(found[0]), lambda tokens: linear_calls(found, k, tokens))


def compare(layers: str, sizes: str, kind: str, tokens: list[int], config: Any) -> None:
    outputs: dict[int, list[Tensor]] = {}
    times: dict[int, dict[str, float]] = {each: {} for each in tokens}
    kernels = {}
    differences = {}
    for contender, words in CONTENDERS.items():
        os.environ[VARIABLE] = words
        contest = made(layers, sizes, kind)
        kernels[contender] = contest.kernels
        for count in tokens:
            calls = contest.calls(count)
            found = [y.float() for y in run(calls[:CALLS], config, count)]
            differences[count] = relative_difference(outputs.setdefault(count, found), found)
            times[count][contender] = time_of(calls, config, count)
        del contest, calls
        gc.collect()
        torch.cuda.empty_cache()
    for count in tokens:
        record = {layers: sizes, "kind": kind, "tokens": count, "kernels": kernels}
        record |= {f"{contender}_us": round(us, 2) for contender, us in times[count].items()}
        print(json.dumps(record | {"difference": round(differences[count], 5)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", choices=["experts", "linear"])
    parser.add_argument("--kinds", choices=[*KINDS, *LAYERS_ALONE], nargs="+", required=True)
    parser.add_argument("--sizes", nargs="+", help=f"experts: of {', '.join(EXPERTS)}; linear: NxK")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 512, 2048])
    arguments = parser.parse_args()
    if arguments.layers == "experts" and not {*(arguments.sizes or ())} <= {*EXPERTS}:
        parser.error(f"--sizes: expected some of {', '.join(EXPERTS)}, got {' '.join(arguments.sizes)}")
    default = ("qwen3-30b-a3b", "mixtral-8x7b") if arguments.layers == "experts" else LINEAR
    failed = False
    with torch.inference_mode(), engine_config() as config:
        from epiloq.integrations.vllm import register

        register()
        for sizes in arguments.sizes or default:
            for kind in arguments.kinds:
                try:
                    compare(arguments.layers, sizes, kind, arguments.tokens, config)
                except Exception:  # the other layers are still of use
                    failed = True
                    print(f"{sizes}, {kind}: failed", traceback.format_exc(), flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
