"""Times of one layer of experts in vLLM, with vLLM's kernels and with epiloq's.

    python benchmarks/engines/experts.py --kinds w4a16 nvfp4 int8 --layers qwen3-30b-a3b mixtral-8x7b
    python benchmarks/engines/experts.py --kinds mxfp4 --layers gpt-oss-20b

Both contenders run in layers of vLLM's own classes with the same random weights. Routing is given, but vLLM's kernels
for GPT-OSS choose the experts themselves. A CUDA graph has `CALLS` calls with other tokens and experts each, so that
most weights come from memory. Needs a GPU and vLLM; FlashInfer and DeepGEMM would run instead of its own kernels.
Prints one line of JSON for each number of tokens: microseconds of a call, and the relative difference between the
outputs of both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from random_checkpoints import KINDS, LAYERS_ALONE, fill_weights, quantisation, write_config
from torch import Tensor

VARIABLE = "EPILOQ_ENGINE_LAYERS"
CONTENDERS = {"vllm": "none", "epiloq": "all"}
CALLS = 16
REPLAYS = 20


class Sizes(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    intermediate: int


LAYERS = {
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768),
    "mixtral-8x7b": Sizes(8, 2, 4096, 14336),
    "gpt-oss-20b": Sizes(32, 4, 2880, 2880),
}
OPTIONS: dict[str, dict[str, Any]] = {"gpt-oss-20b": {"has_bias": True, "activation": "swigluoai"}}


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


def layer_of(name: str, kind: str, device: str = "cuda", sizes: Sizes | None = None) -> Any:
    """vLLM's layer of experts, ready to be called."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    experts, top_k, hidden, intermediate = sizes or LAYERS[name]
    settings = quantisation(kind, [])
    config = GptOssMxfp4Config() if kind == "mxfp4" else None
    if config is None:
        config = get_quantization_config(settings["quant_method"]).from_config(settings)
    get_current_vllm_config().compilation_config.static_forward_context.clear()
    with torch.device(device):
        runner = FusedMoE(
            num_experts=experts,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=intermediate,
            quant_config=config,
            renormalize=True,
            prefix="model.layers.0.mlp.experts",
            **OPTIONS.get(name, {}),
        )
    layer = runner.routed_experts
    torch.manual_seed(0)
    fill_weights(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


class Call(NamedTuple):
    """Rows of inputs and the scores of all experts; of the best ones, weights that add up to 1, and numbers."""

    x: Tensor
    logits: Tensor
    weights: Tensor
    ids: Tensor


def calls_of(sizes: Sizes, tokens: int, layer: Any, device: str = "cuda") -> list[Call]:
    torch.manual_seed(tokens)
    kind = getattr(layer.quant_method, "topk_indices_dtype", None) or torch.int32
    found = []
    for _ in range(CALLS):
        x = torch.randn(tokens, sizes.hidden, device=device, dtype=torch.bfloat16)
        logits = torch.randn(tokens, sizes.experts, device=device, dtype=torch.bfloat16)
        best, ids = logits.float().topk(sizes.top_k)
        found.append(Call(x, logits, best.softmax(-1), ids.to(kind)))
    return found


def run(layer: Any, config: Any, calls: list[Call]) -> list[Tensor]:
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config, num_tokens=len(calls[0].x)):
        if layer.quant_method.is_monolithic:
            return [layer.forward_monolithic(each.x, each.logits) for each in calls]
        return [layer.forward_modular(each.x, each.weights, each.ids) for each in calls]


def time_of(layer: Any, config: Any, calls: list[Call]) -> float:
    """Microseconds of a call within a CUDA graph: a median of eight rounds."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            run(layer, config, calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(layer, config, calls)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / (REPLAYS * CALLS))
    return statistics.median(times)


def method_of(layer: Any) -> str:
    """The class that runs the layer, and vLLM's choice of kernels where it keeps one."""
    method = layer.quant_method
    if hasattr(layer, "epiloq"):
        return f"epiloq {method.epiloq.kind}"
    backends = [
        str(getattr(value, "name", value))
        for key, value in vars(method).items()
        if key.endswith("backend") and value is not None
    ]
    return " ".join([type(method).__name__, *backends])


def relative_difference(exact: list[Tensor], found: list[Tensor]) -> float:
    return float((torch.cat(exact) - torch.cat(found)).norm() / torch.cat(exact).norm())


def compare(name: str, kind: str, tokens: list[int], config: Any) -> None:
    outputs: dict[int, list[Tensor]] = {}
    times: dict[int, dict[str, float]] = {each: {} for each in tokens}
    kernels = {}
    differences = {}
    for contender, words in CONTENDERS.items():
        os.environ[VARIABLE] = words
        layer = layer_of(name, kind)
        kernels[contender] = method_of(layer)
        for count in tokens:
            calls = calls_of(LAYERS[name], count, layer)
            found = [y.float() for y in run(layer, config, calls)]
            first = outputs.setdefault(count, found)
            differences[count] = relative_difference(first, found)
            times[count][contender] = time_of(layer, config, calls)
        del layer, calls
        gc.collect()
        torch.cuda.empty_cache()
    for count in tokens:
        record = {"experts": name, "kind": kind, "tokens": count, "kernels": kernels}
        record |= {f"{contender}_us": round(us, 2) for contender, us in times[count].items()}
        print(json.dumps(record | {"difference": round(differences[count], 5)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", choices=[*KINDS, *LAYERS_ALONE], nargs="+", required=True)
    parser.add_argument("--layers", choices=LAYERS, nargs="+", default=["qwen3-30b-a3b", "mixtral-8x7b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 512, 2048])
    arguments = parser.parse_args()
    failed = False
    with torch.inference_mode(), engine_config() as config:
        from epiloq.integrations.vllm import register

        register()
        for name in arguments.layers:
            for kind in arguments.kinds:
                try:
                    compare(name, kind, arguments.tokens, config)
                except Exception:  # the other layers are still of use
                    failed = True
                    print(f"{name}, {kind}: failed", traceback.format_exc(), flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
