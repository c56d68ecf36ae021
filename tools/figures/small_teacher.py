"""Trains a small language model whose weights were never quantised, for measuring schemes and algorithms.

    python tools/figures/small_teacher.py OUTPUT [--steps 650]

The model is a Llama of about 10 million parameters with a byte-level tokenizer of 512 tokens. It is trained on text
from the standard library: the last three quarters of Python's language reference (`pydoc_data.topics`), whose first
quarter `scheme_table.py` reserves for evaluation, and docstrings. The same seed gives the same model on the same
machine with the same number of threads. Training takes about ten minutes on one core.
"""

from __future__ import annotations

import ast
import math
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

END = "<|end|>"
WARMING, FLOOR = 0.05, 0.1
"""Fraction of the steps for warm-up, and the final learning rate as a fraction of the peak."""
WEIGHT_DECAY, LARGEST_NORM, BETAS = 0.1, 1.0, (0.9, 0.95)


class Recipe(NamedTuple):
    """Sizes of the model and of its training; a step is `batch` windows of `length` tokens."""

    vocabulary: int = 512
    hidden: int = 320
    layers: int = 8
    heads: int = 5
    feed_forward: int = 896
    length: int = 512
    batch: int = 2
    steps: int = 650
    rate: float = 1e-3
    seed: int = 0


def reference() -> str:
    """Return the language reference without its first quarter."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics.values())
    return whole[len(whole) // 4 :]


def docstrings(folder: Path) -> Iterator[str]:
    """Yield the docstrings of each module under a folder, ordered by file name, without tests and site-packages."""
    for file in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test", "pydoc_data"} & set(file.relative_to(folder).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [
            message for node in ast.walk(tree) if isinstance(node, documented) and (message := ast.get_docstring(node))
        ]
        if found:
            yield "\n\n".join(found)


def tokenizer_of(texts: list[str], vocabulary: int) -> Any:
    """Train a byte-level BPE tokenizer; `END` is its BOS and EOS token."""
    import tokenizers
    import transformers

    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    wrapper: Any = transformers.PreTrainedTokenizerFast
    return wrapper(tokenizer_object=found, bos_token=END, eos_token=END)


def windows_of(tokenizer: Any, texts: list[str], length: int) -> Tensor:
    """Tokenise all texts as one stream and cut it into windows, int64 ``[count, length]``."""
    stream: list[int] = []
    for ids in tokenizer(texts, verbose=False)["input_ids"]:
        stream += [tokenizer.eos_token_id, *ids]
    count = len(stream) // length
    if not count:
        raise ValueError(f"small_teacher: text: expected at least {length} tokens, got {len(stream)}")
    return torch.tensor(stream[: count * length], dtype=torch.int64).view(count, length)


def blank(recipe: Recipe, vocabulary: int, end: int) -> Any:
    """Create the untrained model from the recipe's seed."""
    import transformers

    torch.manual_seed(recipe.seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def train(model: Any, windows: Tensor, recipe: Recipe) -> list[float]:
    """Train in place by AdamW with warm-up and cosine decay; returns the loss of each step."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=BETAS)
    draw, rise, lost = torch.Generator().manual_seed(recipe.seed), max(1, int(WARMING * recipe.steps)), list[float]()
    model.train()
    for step in range(recipe.steps):
        done = max(0.0, (step - rise) / max(1, recipe.steps - rise))
        part = min((step + 1) / rise, FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = part * recipe.rate
        chosen = windows[torch.randint(len(windows), (recipe.batch,), generator=draw)]
        with torch.autocast("cpu", torch.bfloat16):  # affects products only; weights and gradients are float32
            loss = model(chosen, labels=chosen).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        lost.append(float(loss.detach()))
        if step % 20 == 0:
            print(f"step {step} of {recipe.steps}: loss {lost[-1]:.3f}", flush=True)
    model.eval()
    return lost


def main(
    output: Annotated[Path, typer.Argument(help="The model directory to make.")],
    steps: Annotated[int, typer.Option(min=1)] = Recipe().steps,
    seed: Annotated[int, typer.Option()] = Recipe().seed,
) -> None:
    """Train and save the model with its tokenizer."""
    if output.exists():
        raise typer.BadParameter(f"{output} exists already")
    recipe = Recipe(steps=steps, seed=seed)
    texts = [reference(), *docstrings(Path(sysconfig.get_paths()["stdlib"]))]
    tokenizer = tokenizer_of(texts, recipe.vocabulary)
    windows = windows_of(tokenizer, texts, recipe.length)
    model = blank(recipe, len(tokenizer), int(tokenizer.eos_token_id))
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, {windows.numel()} tokens of text"
    )
    train(model, windows, recipe)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    typer.run(main)
