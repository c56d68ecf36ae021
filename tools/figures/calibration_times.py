"""Time ``epiloq quantize`` of a random model with the shape of Llama-3-8B on 1, 2, 4 … ranks.

    python tools/figures/calibration_times.py --ranks 1 2 4 --device cuda --json times.json

A few blocks are timed, and the whole model's time is extrapolated from the time per block. Weights and text are random,
which does not affect the time.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
BLOCKS, VOCABULARY = 32, 256
"""Blocks of the whole model. The vocabulary is that of bytes, since embeddings are not quantised."""


def make_model(folder: Path, blocks: int, shape: dict[str, Any], positions: int) -> None:
    """Write a random model in bfloat16 and a byte-level tokenizer."""
    import tokenizers
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=blocks,
        max_position_embeddings=positions,
        dtype=torch.bfloat16,
        **shape,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    wrapper: Any = transformers.PreTrainedTokenizerFast
    wrapper(tokenizer_object=tokenizer).save_pretrained(folder)


def run(folder: Path, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run `epiloq quantize` on this number of ranks and return its report."""
    output, report = folder / f"out-{ranks}", folder / f"{ranks}.json"
    command = ["quantize", str(folder / "model"), "--output", str(output), "--scheme", arguments.scheme]
    command += ["--algorithm", arguments.algorithm, "--calibration", str(folder / "text"), "--json", str(report)]
    command += ["--windows", str(arguments.windows), "--length", str(arguments.length), "--device", arguments.device]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    subprocess.run([sys.executable, *launcher, "-m", "epiloq", *command], check=True)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Print a line per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--blocks", type=int, default=3, help="blocks that are timed")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--scheme", default="w4a16-g128")
    parser.add_argument("--algorithm", default="gptq")
    parser.add_argument("--shrink", type=int, default=1, help="2, 4 or 8: divide sizes, to try this program")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shape = {name: size if name == "head_dim" else size // arguments.shrink for name, size in SHAPE.items()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_model(folder / "model", arguments.blocks, shape, arguments.length)
        letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=arguments.windows * arguments.length + 1000)
        (folder / "text").write_text("".join(letters), encoding="utf-8")
        for ranks in arguments.ranks:
            found = run(folder, ranks, arguments)
            seconds = found["stages"]["quantise"]
            rows.append(
                {
                    "ranks": ranks,
                    "shape": shape,
                    "blocks": arguments.blocks,
                    "tokens": found["calibration_tokens"],
                    "algorithm": found["algorithm"],
                    "scheme": found["scheme"],
                    "seconds": seconds,
                    "extrapolated_seconds": seconds / arguments.blocks * BLOCKS,
                    "speedup": rows[0]["seconds"] / seconds if rows else 1.0,
                    "peak_memory_bytes": found["peak_memory_bytes"],
                    "environment": found["environment"],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
