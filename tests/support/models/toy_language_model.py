"""A language model in outline, for what is done to whole models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from epiloq.nn.base.quantized_layer import QuantizedLayer


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class LanguageModel(nn.Module):
    """Embedding, blocks, head, as language models are built; `head` is the head's attribute name."""

    def __init__(self, head: str = "head", tied: bool = False, width: int = 20, vocabulary: int = 33) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head_name = head
        self.add_module(head, nn.Linear(width, vocabulary, bias=False))
        if tied:
            self.get_submodule(head).weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.get_submodule(self.head_name)(x)


IN_BLOCKS = [f"blocks.{i}.{leaf}" for i in range(3) for leaf in ("up", "down")]


def tokens() -> Tensor:
    return torch.randint(0, 33, (4, 16))


def quantised(model: nn.Module) -> list[str]:
    """The names of a model's quantised layers."""
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedLayer)]
