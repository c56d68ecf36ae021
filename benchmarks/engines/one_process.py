"""Tokens per second of vLLM, its own kernels and epiloq's in one process, on random weights.

    python benchmarks/engines/one_process.py --kinds w4a16 fp8 int8
    python benchmarks/engines/one_process.py --kinds w4a16 fp8 --model qwen3-30b-a3b --contenders vllm linear epiloq
    python benchmarks/engines/one_process.py --kinds mxfp4 --model gpt-oss-20b --layers 8 --checkpoints DIR

A quicker `tokens_per_second.py`: it starts one engine after the other in the same process, and captures decode graphs,
without compiling unless `--compile` is given. Triton attention, and no FlashInfer, so that vLLM's Python files and its
two kernel libraries are enough.

By default the weights are made in place. With `--checkpoints` random checkpoints are written there, once, and the
greedy outputs of each contender are compared with those of vLLM's own kernels, also if these ran in an earlier process.
A step of few layers is limited by the host, so that its time says little about kernels. Prints one line of JSON for
each kind and contender.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from random_checkpoints import KINDS, MODELS, fill_weights, write_checkpoint, write_config

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# vLLM's sampler imports FlashInfer, even for temperature 0, unless this is 0. Both contenders use PyTorch's.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

CONTENDERS = {"vllm": "none", "linear": "int8,fp8,fp8-block,w4a16,w8a16", "epiloq": "all"}
"""Values of EPILOQ_ENGINE_LAYERS; linear has epiloq's linear layers and vLLM's experts."""
PROMPT = 32


def engine_of(folder: Path, arguments: argparse.Namespace) -> Any:
    from vllm import LLM

    graphs: dict[str, Any] = {"cudagraph_capture_sizes": arguments.batches}
    if not arguments.compile:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy" if arguments.checkpoints is None else "safetensors",
        max_model_len=1024,
        max_num_seqs=max(arguments.batches),
        gpu_memory_utilization=arguments.memory,
        enable_prefix_caching=False,
        disable_log_stats=True,
        attention_backend="TRITON_ATTN",
        enforce_eager=arguments.eager,
        **({} if arguments.eager else {"compilation_config": graphs}),
    )


class Rate(NamedTuple):
    """Tokens per second of each run, milliseconds of a prompt with its first token, and the tokens of the last run."""

    runs: list[float]
    first_ms: float
    outputs: list[list[int]]


def rate(engine: Any, vocabulary: int, batch: int, tokens: int) -> Rate:
    from vllm import SamplingParams

    numbers = random.Random(batch)
    prompts = [{"prompt_token_ids": [numbers.randrange(vocabulary) for _ in range(PROMPT)]} for _ in range(batch)]

    def generate(count: int) -> tuple[float, Any]:
        options = SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = engine.generate(prompts, options, use_tqdm=False)
        return time.perf_counter() - start, outputs

    runs, outputs = [], []
    for _ in range(6):
        seconds, outputs = generate(tokens)
        runs.append(batch * tokens / seconds)
    first = statistics.median(generate(1)[0] for _ in range(5))
    return Rate(runs, 1e3 * first, [list(output.outputs[0].token_ids) for output in outputs])


def measure(folder: Path, arguments: argparse.Namespace) -> dict[int, Rate]:
    """Start an engine and end it, so that its memory is free for the next."""
    import torch
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if arguments.checkpoints is None:
        import vllm.model_executor.model_loader.dummy_loader as loader

        loader.initialize_dummy_weights = lambda layer, *_: fill_weights(layer)
    engine = engine_of(folder, arguments)
    vocabulary = MODELS[arguments.model]["vocab_size"]
    try:
        return {batch: rate(engine, vocabulary, batch, arguments.tokens) for batch in arguments.batches}
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()
        torch.cuda.empty_cache()


def agreement(tokens: list[list[int]], others: list[list[int]]) -> dict[str, float]:
    """How far greedy outputs agree: equal tokens, equal first tokens, and equal tokens before the first difference.

    Rounding alone makes outputs part at some token, and all later tokens then differ; a wrong product also changes
    most first tokens.
    """
    same = [[a == b for a, b in zip(*pair, strict=True)] for pair in zip(tokens, others, strict=True)]
    return {
        "equal": sum(map(sum, same)) / sum(map(len, same)),
        "first": sum(each[0] for each in same) / len(same),
        "before_difference": statistics.mean([*each, False].index(False) for each in same),
    }


def compare(folder: Path, name: str, mode: str, outputs: dict[int, list[list[int]]]) -> dict[int, dict[str, float]]:
    """Keep a contender's outputs beside the checkpoint, and compare them with those of vLLM's own kernels."""
    (folder / f"outputs-{name}-{mode}.json").write_text(json.dumps(outputs), encoding="utf-8")
    reference = folder / f"outputs-vllm-{mode}.json"
    if name == "vllm" or not reference.exists():
        return {}
    own = json.loads(reference.read_text(encoding="utf-8"))
    return {batch: agreement(own[str(batch)], outputs[batch]) for batch in outputs if str(batch) in own}


def contend(kind: str, folder: Path, arguments: argparse.Namespace) -> None:
    sizes = {} if arguments.layers is None else {"num_hidden_layers": arguments.layers}
    if arguments.checkpoints is None:
        write_config(folder, arguments.model, kind, sizes)
    elif not (folder / "config.json").exists():
        write_checkpoint(folder, arguments.model, kind, sizes)
    for name in [] if arguments.write else arguments.contenders:
        os.environ["EPILOQ_ENGINE_LAYERS"] = CONTENDERS[name]
        if name != "vllm":
            import epiloq  # noqa: F401  # vLLM only logs the error of a plug-in that cannot be imported
        start = time.perf_counter()
        found = measure(folder, arguments)
        record: dict[str, Any] = {
            "model": arguments.model,
            "layers": arguments.layers,
            "kind": kind,
            "compile": arguments.compile,
            "eager": arguments.eager,
            "contender": name,
            "seconds": round(time.perf_counter() - start, 1),
            # The first two runs do not count.
            "tokens_per_second": {batch: round(statistics.median(each.runs[2:]), 1) for batch, each in found.items()},
            "first_token_ms": {batch: round(each.first_ms, 2) for batch, each in found.items()},
            "runs": {batch: [round(run, 1) for run in each.runs] for batch, each in found.items()},
        }
        if arguments.checkpoints is not None:
            mode = "compiled" if arguments.compile else "eager" if arguments.eager else "graphs"
            outputs = {batch: each.outputs for batch, each in found.items()}
            record["agreement"] = compare(folder, name, mode, outputs)
        print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=["w4a16", "fp8", "int8"])
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--contenders", choices=CONTENDERS, nargs="+", default=["vllm", "epiloq"])
    parser.add_argument("--layers", type=int, help="the model's, by default")
    parser.add_argument("--memory", type=float, default=0.25, help="part of the GPU's for an engine")
    parser.add_argument("--tokens", type=int, default=128, help="generated for each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--eager", action="store_true", help="without CUDA graphs")
    modes.add_argument("--compile", action="store_true", help="as vLLM does by default")
    parser.add_argument("--checkpoints", type=Path, help="folder for random checkpoints, which later runs reuse")
    parser.add_argument("--write", action="store_true", help="write the checkpoints only")
    parser.add_argument("--wait", action="store_true", help="import vLLM, then wait for a line on standard input")
    arguments = parser.parse_args()
    if arguments.write and arguments.checkpoints is None:
        parser.error("--write needs --checkpoints")
    if arguments.wait:
        import vllm.v1.worker.gpu_worker  # noqa: F401
        from vllm import LLM  # noqa: F401

        sys.stdin.readline()
    with tempfile.TemporaryDirectory() as temporary:
        for kind in arguments.kinds:
            contend(kind, Path(arguments.checkpoints or temporary) / f"{arguments.model}-{kind}", arguments)


if __name__ == "__main__":
    main()
