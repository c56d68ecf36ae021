"""LoRA on a 4-bit model: quantise, train an adapter with PEFT, save it, open it again.

    python examples/lora_on_4bit.py                                     # a small model, trained here
    python examples/lora_on_4bit.py --model DIR --text FILE --scheme w4a16-g64

Needs `pip install '.[lora]'`. The weights stay quantised and frozen; gradients pass through them to the adapter.
Without arguments the small model of gptq_language_model.py, which knows sentences about animals, learns others about
ships. For comparison the same adapter is trained on the float model.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import epiloq
from epiloq.integrations.peft import linear_names  # the import lets PEFT take epiloq's layers
from gptq_language_model import sentences, train_small_model

LENGTH, BATCH = 128, 8


def sentences_about_ships(count: int, seed: int) -> str:
    """Text of another kind than the small model was trained on."""
    rng = random.Random(seed)
    ships, ports = ("ferry", "tanker", "schooner", "trawler"), ("Bergen", "Cadiz", "Malmo", "Porto")
    lines = (
        f"On day {rng.randrange(1, 32)} the {rng.choice(ships)} sails from {port} to {other} in the {wind} wind.\n"
        for port, other, wind in ((*rng.sample(ports, 2), rng.choice(("north", "south", "west"))) for _ in range(count))
    )
    return "".join(lines)


def with_adapter(model: nn.Module) -> Any:
    """The model with LoRA on its linear layers, whatever they are made of."""
    targets = linear_names(model) or [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name
    ]
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets))


def train(model: Any, windows: Tensor, steps: int) -> None:
    """A few steps on int64 ``[n, LENGTH]`` windows."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for step in range(steps):
        batch = windows[torch.randint(len(windows), (BATCH,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"  step {step + 1}: loss {loss.item():.2f}")


@torch.no_grad()
def loss_on(model: Any, windows: Tensor) -> float:
    return float(model(input_ids=windows, labels=windows).loss)


def main() -> dict[str, float]:
    """Losses on text that was not trained on, by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--text", type=Path, help="text to learn")
    parser.add_argument("--scheme", default="w4a16-g32", help="one of epiloq.schemes.available() [w4a16-g32]")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or Path(scratch, "model")
        if options.model is None:
            train_small_model(folder, sentences(2000, seed=0), steps=120)
        text = options.text.read_text() if options.text else sentences_about_ships(600, seed=0)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer(text, return_tensors="pt")["input_ids"][0]
        windows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
        kept, learned = windows[:16], windows[16:]

        base = AutoModelForCausalLM.from_pretrained(folder)
        quantized = epiloq.quantize_(copy.deepcopy(base), options.scheme)
        found = {"float, before": loss_on(base, kept), f"{options.scheme}, before": loss_on(quantized, kept)}
        untrained = copy.deepcopy(quantized)
        for name, model in (("float", base), (options.scheme, quantized)):
            print(name)
            adapted = with_adapter(model)
            train(adapted, learned, options.steps)
            found[f"{name}, after"] = loss_on(adapted, kept)

        adapted.save_pretrained(Path(scratch, "adapter"))  # some kilobytes; the 4-bit model is unchanged
        again = peft.PeftModel.from_pretrained(untrained, Path(scratch, "adapter"))
        found[f"{options.scheme}, adapter opened again"] = loss_on(again, kept)
        for name, value in found.items():
            print(f"{name:36} loss {value:.3f}")
    return found


if __name__ == "__main__":
    main()
