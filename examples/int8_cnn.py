"""Your own convolutional network in int8: train, fold batch norms, calibrate, exchange int8 between layers, compare.

    python examples/int8_cnn.py

The network tells stripes of four directions apart in noise. The quantised one is compared with the float one: how
often both choose the same class, how many are right, the bytes of the weights, and the time on this machine's CPU.
"""

from __future__ import annotations

import copy
import math
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import epiloq
from epiloq.quantize.int8_graph.batch_norm import fold_batch_norm_
from epiloq.quantize.int8_graph.exchange import exchange_int8

CLASSES, SIZE = 4, 32


def images_and_labels(count: int) -> tuple[Tensor, Tensor]:
    """Stripes of four directions, random phase and period, in noise: ``[count, 3, 32, 32]`` and ``[count]``."""
    labels = torch.randint(CLASSES, (count,))
    angle = labels * math.pi / CLASSES
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    place = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    period = 4 + 4 * torch.rand(count, 1, 1)
    stripes = (2 * math.pi * (place / period + torch.rand(count, 1, 1))).sin()
    return stripes[:, None] + 1.5 * torch.randn(count, 3, SIZE, SIZE), labels


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def train(steps: int = 60) -> nn.Sequential:
    """The float network, in eval mode."""
    model = nn.Sequential(
        block(3, 32, 2),
        block(32, 64, 2),
        block(64, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        images, labels = images_and_labels(64)
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    return model.eval()


def megabytes(model: nn.Module) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()) / 1e6


def seconds(model: nn.Module, images: Tensor) -> float:
    """The fastest of ten calls."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        model(images)
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def compare(float_model: nn.Module, int8_model: nn.Module) -> dict[str, float]:
    images, labels = images_and_labels(512)
    expected, found = float_model(images).argmax(-1), int8_model(images).argmax(-1)
    return {
        "float: right": (expected == labels).float().mean().item(),
        "int8: right": (found == labels).float().mean().item(),
        "same class": (found == expected).float().mean().item(),
        "float: MB": megabytes(float_model),
        "int8: MB": megabytes(int8_model),
        "float: ms per image": seconds(float_model, images) / len(images) * 1e3,
        "int8: ms per image": seconds(int8_model, images) / len(images) * 1e3,
    }


def main() -> dict[str, float]:
    """What `compare` measures, printed."""
    torch.manual_seed(0)
    float_model = train()
    images, _ = images_and_labels(64)  # to calibrate with

    model = copy.deepcopy(float_model)
    with torch.no_grad():
        fold_batch_norm_(model)
        epiloq.quantize_(model, "conv-w8a8-int8", calibrate=lambda m: m(images), observer="mse")
        epiloq.quantize_(model, "w8a8-int8")  # the linear layer
        int8_model = exchange_int8(model, calibrate=lambda m: m(images))

    found = compare(float_model, int8_model)
    for name, value in found.items():
        print(f"{name:20} {value:.3f}")
    return found


if __name__ == "__main__":
    main()
