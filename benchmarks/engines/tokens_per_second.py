"""Tokens per second of vLLM on a random Llama-shaped checkpoint, with epiloq's kernels and with vLLM's own.

    python benchmarks/engines/tokens_per_second.py --kind w4a16 --json build/engines.json

Each contender runs in a process of its own, for an engine cannot be restarted within one. Weights are random and
tokens are fed as numbers, so that no tokenizer is needed. Kinds: w4a16 (compressed-tensors, groups of 128), int8, fp8.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
SCHEMES = {"w4a16": "w4a16-g128", "int8": "w8a8-int8", "fp8": "fp8-token"}
VOCABULARY = 32000


def write_checkpoint(folder: Path, shape: str, layers: int | None, kind: str) -> None:
    """A model with random weights, quantised layer by layer, in compressed-tensors' format."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import epiloq
    from epiloq.formats import convert, epiloq_modules

    sizes = dict(SHAPES[shape])
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    config = LlamaConfig(
        **sizes, num_key_value_heads=8, vocab_size=VOCABULARY, max_position_embeddings=4096, dtype=torch.bfloat16
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    epiloq.quantize_(model, SCHEMES[kind])
    with tempfile.TemporaryDirectory() as own:
        epiloq_modules.save(model.cpu(), Path(own) / "own")
        convert.perform(convert.prepare(Path(own) / "own", folder, "compressed-tensors"))


def measure(
    folder: str, tokens: int, batches: list[int], eager: bool = False, attention: str | None = None
) -> dict[str, Any]:
    """Tokens per second for each batch, the median of five runs after two that do not count."""
    import statistics

    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="safetensors",
        max_model_len=2048,
        gpu_memory_utilization=0.6,
        enforce_eager=eager,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **({} if attention is None else {"attention_backend": attention}),
    )
    options = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
    found: dict[str, Any] = {}
    for batch in batches:
        prompts = [{"prompt_token_ids": [(7 * i + j) % VOCABULARY for j in range(32)]} for i in range(batch)]
        rates = []
        for _ in range(7):
            start = time.perf_counter()
            outputs = engine.generate(prompts, options, use_tqdm=False)
            seconds = time.perf_counter() - start
            assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
            rates.append(batch * tokens / seconds)
        found[str(batch)] = {"tokens_per_second": statistics.median(rates[2:]), "runs": rates}
    return found


def contend(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One contender in a process of its own."""
    environment = dict(os.environ, EPILOQ_ENGINE_LAYERS="all" if name == "epiloq" else "none")
    if importlib.util.find_spec("flashinfer") is None:
        environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # else vLLM's sampler imports it
    environment["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # the last line of stdout is the result
    command = [sys.executable, __file__, "--measure", str(folder), "--tokens", str(arguments.tokens), "--batches"]
    command += [str(batch) for batch in arguments.batches] + (["--eager"] if arguments.eager else [])
    command += [] if arguments.attention is None else ["--attention", arguments.attention]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=arguments.timeout)
    if run.returncode:
        raise SystemExit(f"{name}: the engine ended with {run.returncode}")
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=SCHEMES, default="w4a16")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="decoder layers, instead of the shape's")
    parser.add_argument("--attention", help="vLLM's attention backend, such as TRITON_ATTN; by default its own choice")
    parser.add_argument("--tokens", type=int, default=128, help="generated for each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and compilation")
    parser.add_argument("--timeout", type=float, default=280, help="seconds for each contender")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        rates = measure(arguments.measure, arguments.tokens, arguments.batches, arguments.eager, arguments.attention)
        print(json.dumps(rates))
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "checkpoint"
        write_checkpoint(folder, arguments.shape, arguments.layers, arguments.kind)
        rates = {name: contend(name, folder, arguments) for name in ("epiloq", "vllm")}
    for batch in map(str, arguments.batches):
        ours, theirs = (rates[name][batch]["tokens_per_second"] for name in ("epiloq", "vllm"))
        print(
            f"{arguments.kind} batch {batch}: epiloq {ours:.0f} tok/s, vLLM {theirs:.0f} tok/s, {ours / theirs:.2f} x"
        )
    if arguments.json:
        settings = ("kind", "shape", "layers", "tokens", "eager", "attention")
        record = {name: getattr(arguments, name) for name in settings} | {"rates": rates}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
