"""Benchmarked convolutions: layers of ResNet-50, and layers like those of PP-OCRv4's detector and recogniser.

In a convolution's case M is the number of images, N the output channels and K the products summed for each output;
the layer's name gives the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """``channels`` and ``outputs`` count all groups; the padding is half the kernel on every side."""

    channels: int
    outputs: int
    image: tuple[int, int]
    kernel: int = 1
    stride: int = 1
    groups: int = 1

    @property
    def k(self) -> int:
        return self.kernel**2 * self.channels // self.groups

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def output_image(self) -> tuple[int, int]:
        height, width = ((size + 2 * self.padding - self.kernel) // self.stride + 1 for size in self.image)
        return height, width


# Each distinct weight shape is listed once; of a stage whose first block has a stride, the later blocks' shapes.
RESNET50: Mapping[str, Layer] = {
    "resnet50 stem 7x7/2": Layer(3, 64, (224, 224), 7, 2),
    "resnet50 1 1x1 in": Layer(256, 64, (56, 56)),
    "resnet50 1 3x3": Layer(64, 64, (56, 56), 3),
    "resnet50 1 1x1 out": Layer(64, 256, (56, 56)),
    "resnet50 2 1x1/2": Layer(256, 512, (56, 56), 1, 2),
    "resnet50 2 1x1 in": Layer(512, 128, (28, 28)),
    "resnet50 2 3x3": Layer(128, 128, (28, 28), 3),
    "resnet50 2 1x1 out": Layer(128, 512, (28, 28)),
    "resnet50 3 1x1 in": Layer(1024, 256, (14, 14)),
    "resnet50 3 3x3": Layer(256, 256, (14, 14), 3),
    "resnet50 3 1x1 out": Layer(256, 1024, (14, 14)),
    "resnet50 4 1x1 in": Layer(2048, 512, (7, 7)),
    "resnet50 4 3x3": Layer(512, 512, (7, 7), 3),
    "resnet50 4 1x1 out": Layer(512, 2048, (7, 7)),
}
PP_OCR: Mapping[str, Layer] = {
    "pp-ocr det stem 3x3/2": Layer(3, 16, (640, 640), 3, 2),
    "pp-ocr det depthwise 3x3": Layer(48, 48, (160, 160), 3, 1, 48),
    "pp-ocr det 1x1": Layer(48, 96, (160, 160)),
    "pp-ocr det neck 3x3": Layer(96, 24, (160, 160), 3),
    "pp-ocr rec depthwise 5x5": Layer(240, 240, (6, 80), 5, 1, 240),
    "pp-ocr rec 1x1": Layer(240, 480, (3, 80)),
    "pp-ocr rec neck 1x3": Layer(480, 56, (1, 40), 3),
}
LAYERS: Mapping[str, Layer] = {**RESNET50, **PP_OCR}
