"""Tokens per second of vLLM, its own kernels and epiloq's in one process, on weights that the engine makes itself.

    python benchmarks/engines/one_process.py --kinds w4a16 fp8 int8
    python benchmarks/engines/one_process.py --kinds w4a16 fp8 --model qwen3-30b-a3b

A quicker `tokens_per_second.py`: it writes only a config.json (Llama-3-8B's or Qwen3-30B-A3B's shape,
compressed-tensors), starts one engine after the other in the same process, and captures decode graphs without
compiling. Triton attention, and no FlashInfer, so that vLLM's Python files and its two kernel libraries are enough.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# vLLM's sampler imports FlashInfer, even for temperature 0, unless this is 0. Both contenders use PyTorch's.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True}
PER_GROUP: dict[str, Any] = {"strategy": "group", "group_size": 128, "dynamic": False}
PER_CHANNEL: dict[str, Any] = {"strategy": "channel", "dynamic": False}
PER_TOKEN: dict[str, Any] = {"strategy": "token", "dynamic": True}
# Format, weights and input activations, as compressed-tensors describes them.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": ("pack-quantized", INT4 | PER_GROUP, None),
    "fp8": ("float-quantized", FP8 | PER_CHANNEL, FP8 | PER_TOKEN),
    "int8": ("int-quantized", INT8 | PER_CHANNEL, INT8 | PER_TOKEN),
}
CONTENDERS = {"vllm": "none", "epiloq": "all"}
LINEAR = {"linear": "int8,fp8,fp8-block,w4a16,w8a16"}
"""Values of EPILOQ_ENGINE_LAYERS; a mixture also runs with epiloq's linear layers and vLLM's experts."""
PROMPT = 32
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}


def write_config(folder: Path, model: str, kind: str, layers: int | None) -> None:
    form, weights, inputs = KINDS[kind]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        **MODELS[model],
        **({} if layers is None else {"num_hidden_layers": layers}),
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": form,
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "config_groups": {"group_0": group},
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def engine_of(folder: Path, batches: list[int], eager: bool, memory: float) -> Any:
    from vllm import LLM

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": batches}
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=max(batches),
        gpu_memory_utilization=memory,
        enable_prefix_caching=False,
        disable_log_stats=True,
        attention_backend="TRITON_ATTN",
        enforce_eager=eager,
        **({} if eager else {"compilation_config": graphs}),
    )


def rate(engine: Any, vocabulary: int, batch: int, tokens: int) -> tuple[float, list[float]]:
    """Tokens per second: the median of four runs after two that do not count, and all runs."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + j) % vocabulary for j in range(PROMPT)]} for i in range(batch)]
    runs = []
    for _ in range(6):
        start = time.perf_counter()
        engine.generate(prompts, options, use_tqdm=False)
        runs.append(batch * tokens / (time.perf_counter() - start))
    return statistics.median(runs[2:]), runs


def measure(folder: Path, arguments: argparse.Namespace) -> dict[int, tuple[float, list[float]]]:
    """Start an engine and end it, so that its memory is free for the next."""
    import torch
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine = engine_of(folder, arguments.batches, arguments.eager, arguments.memory)
    vocabulary = MODELS[arguments.model]["vocab_size"]
    try:
        return {batch: rate(engine, vocabulary, batch, arguments.tokens) for batch in arguments.batches}
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="the model's, by default")
    parser.add_argument("--memory", type=float, default=0.25, help="part of the GPU's for an engine")
    parser.add_argument("--tokens", type=int, default=128, help="generated for each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory() as parent:
            write_config(Path(parent), arguments.model, kind, arguments.layers)
            found = {}
            contenders = CONTENDERS | (LINEAR if "num_experts" in MODELS[arguments.model] else {})
            for name, chosen in contenders.items():
                os.environ["EPILOQ_ENGINE_LAYERS"] = chosen
                found[name] = measure(Path(parent), arguments)
        for batch in arguments.batches:
            rates = {name: found[name][batch][0] for name in found}
            runs = {name: [round(run, 1) for run in found[name][batch][1]] for name in found}
            gain = rates["epiloq"] / rates["vllm"]
            record = {"kind": kind, "batch": batch, **rates, "gain": gain, "runs": runs}
            print(json.dumps(vars(arguments) | record), flush=True)


if __name__ == "__main__":
    main()
