"""A language model in 4 bits by GPTQ, end to end: quantise, open in transformers, measure, generate.

    python examples/gptq_language_model.py                                              # a small model, trained here
    python examples/gptq_language_model.py --model DIR --calibration FILE --evaluation OTHER_FILE

Without arguments it trains a byte-level Llama for some seconds on made-up sentences, so that it needs no download. It
then runs `epiloq quantize` twice, by round-to-nearest and by GPTQ, and prints the perplexity of all three models.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import epiloq.integrations.transformers  # noqa: F401 (the import registers epiloq)
from epiloq.evaluation.perplexity import perplexity

SCHEME = "w4a16-g128"
LENGTH = 128  # tokens in a window


def sentences(count: int, seed: int) -> str:
    """Made-up text, in which what comes later depends on what came before."""
    rng = random.Random(seed)
    colours, animals = ("red", "green", "blue", "yellow"), ("cat", "dog", "horse", "bird", "mouse", "fish")
    verbs, places = ("sees", "follows", "likes", "finds"), ("house", "river", "garden", "street")
    lines = []
    for _ in range(count):
        first, second = rng.sample(animals, 2)
        colour, verb, place = rng.choice(colours), rng.choice(verbs), rng.choice(places)
        lines.append(f"The {colour} {first} {verb} the {second} near the {place}. So the {second} knows the {first}.\n")
    return "".join(lines)


def train_small_model(folder: Path, text: str, steps: int = 200) -> None:
    """A byte-level Llama and its tokenizer, saved as a Hugging Face directory."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokens = torch.tensor(tokenizer.encode(text).ids)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (8,))
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def measure(folder: Path, text: str) -> tuple[Any, float]:
    """The model of a directory, and its perplexity on the first 32 windows of a text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    return model, perplexity(model, list(tokens[:, : 32 * LENGTH].split(LENGTH, 1)))


def main() -> dict[str, float]:
    """Perplexities by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--calibration", type=Path, help="text to calibrate with")
    parser.add_argument("--evaluation", type=Path, help="other text, to measure perplexity on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, calibration, evaluation = options.model, options.calibration, options.evaluation
        if model is None:
            model, calibration, evaluation = folder / "model", folder / "calibration.txt", folder / "evaluation.txt"
            calibration.write_text(sentences(400, seed=1))
            evaluation.write_text(sentences(400, seed=2))
            train_small_model(model, sentences(2000, seed=0))

        text = evaluation.read_text()
        float_model, value = measure(model, text)
        found = {"floating point": value}
        for algorithm, more in (("rtn", ()), ("gptq", ("--calibration", calibration, "--length", LENGTH))):
            output = folder / algorithm
            command = ["quantize", model, "--scheme", SCHEME, "--algorithm", algorithm, "--output", output, *more]
            subprocess.run([sys.executable, "-m", "epiloq", *map(str, command)], check=True)
            quantized, found[f"{SCHEME} by {algorithm}"] = measure(output, text)

        tokenizer = AutoTokenizer.from_pretrained(model)
        prompt = tokenizer(text[:11], return_tensors="pt")["input_ids"]
        for name, each in {"floating point": float_model, SCHEME: quantized}.items():
            answer = each.generate(input_ids=prompt, max_new_tokens=60, do_sample=False)
            print(f"{name}: {tokenizer.decode(answer[0])!r}")
        for name, value in found.items():
            print(f"{name:20} perplexity {value:.4f}")
    return found


if __name__ == "__main__":
    main()
