"""Measurements: the float networks, then each variant, on each device."""

from __future__ import annotations

import copy
import io
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.demo import speed
from epiloq.demo.layers import weight_bytes
from epiloq.demo.vision import networks, ocr
from epiloq.demo.vision.drawing import Page
from epiloq.demo.vision.material import Material
from epiloq.demo.vision.networks import Quantised, Variant
from epiloq.demo.vision.results import Cost, Found, Results, Run
from epiloq.progress import Advance, Stage

FLOAT = "float"
REPEATS = 9
# The linear layers' CUDA kernels write 16-bit outputs.
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}
SHORT = {torch.float32: "fp32", torch.float16: "fp16"}


@dataclass(frozen=True)
class Pair:
    """A detector and a recogniser on one device."""

    detector: Quantised
    recogniser: Quantised
    characters: Sequence[str]
    device: str
    dtype: torch.dtype

    def maps(self, pages: Sequence[Page]) -> list[Tensor]:
        """Compute the detector's probability map of each page, float32 [H, W] on the CPU."""
        inputs = (self.place(ocr.page_tensor(page.image)) for page in pages)
        return [self.detector.network(x)[0, 0].float().cpu() for x in inputs]

    def texts(self, batches: Sequence[Tensor]) -> list[str]:
        """Recognise the words of all batches."""
        probabilities = (self.recogniser.network(self.place(batch)) for batch in batches)
        return [text for found in probabilities for text in ocr.read(found, self.characters)]

    def found(self, page: Page, probabilities: Tensor) -> tuple[Found, ...]:
        """Recognise the words of a page in the boxes of its probability map."""
        frames = ocr.boxes(probabilities[: page.image.height, : page.image.width])
        # Words are read one at a time, since the padding of a batch would change their probabilities slightly.
        texts = self.texts([ocr.word_batch([page.image.crop(frame)]) for frame in frames])
        return tuple(Found(box, text) for box, text in zip(frames, texts, strict=True))

    def place(self, x: Tensor) -> Tensor:
        """Move a tensor to the networks' device and dtype."""
        return x.to(self.device, self.dtype)


@dataclass(frozen=True)
class Reference:
    """Results of the float networks in float32 on the CPU."""

    maps: list[Tensor]
    texts: list[str]


def cost(quantised: Quantised, baseline: nn.Module, image: Tensor) -> Cost:
    """Measure bytes, and time per image of a batch alternately with the float network."""
    wait = torch.cuda.synchronize if image.is_cuda else lambda: None
    models = [quantised.network] if quantised.network is baseline else [quantised.network, baseline]
    seconds = speed.median_seconds([partial(model, image) for model in models], REPEATS, wait)
    return Cost(
        weight_bytes(quantised.network),
        seconds[0] / len(image),
        seconds[-1] / seconds[0],
        quantised.errors,
        quantised.linked,
        quantised.exceptions,
    )


@torch.inference_mode()
def measure_pair(
    name: str, pair: Pair, floats: Pair, material: Material, reference: Reference, advance: Advance
) -> Run:
    """Measure one pair of networks."""
    maps = pair.maps(material.pages)
    advance()
    texts = pair.texts(material.batches)
    advance()
    found = [pair.found(page, probabilities) for page, probabilities in zip(material.pages, maps, strict=True)]
    right = [
        (Counter(word.text.strip() for word in words) & Counter(page.words)).total()
        for words, page in zip(found, material.pages, strict=True)
    ]
    advance()
    ious = [ocr.map_iou(a, b) for a, b in zip(maps, reference.maps, strict=True)]
    page, words = ocr.page_tensor(material.pages[0].image), material.batches[len(material.batches) // 2]
    detector = cost(pair.detector, floats.detector.network, pair.place(page))
    recogniser = cost(pair.recogniser, floats.recogniser.network, pair.place(words))
    advance()
    return Run(
        name,
        f"{pair.device} {SHORT[pair.dtype]}",
        detector,
        recogniser,
        statistics.mean(ious),
        min(ious),
        ocr.agreement(texts, reference.texts),
        ocr.agreement([text.strip() for text in texts], material.words),
        sum(right) / max(1, sum(len(page.words) for page in material.pages)),
        found[0],
    )


def measure_device(
    floats: Pair, variants: Sequence[Variant], material: Material, reference: Reference, stage: Stage
) -> list[Run]:
    """Measure the float networks and every variant on one device."""
    runs = []
    with stage(f"float on {floats.device}", 4) as advance:
        runs.append(measure_pair(FLOAT, floats, floats, material, reference, advance))
    pages = [floats.place(ocr.page_tensor(page.image)) for page in material.calibration_pages]
    words = [floats.place(batch) for batch in material.calibration_batches]
    for variant in variants:
        with stage(f"{variant.name} on {floats.device}", 6) as advance:
            detector = networks.quantise(floats.detector.network, variant, pages)
            advance()
            recogniser = networks.quantise(floats.recogniser.network, variant, words)
            advance()
            pair = Pair(detector, recogniser, floats.characters, floats.device, floats.dtype)
            runs.append(measure_pair(variant.name, pair, floats, material, reference, advance))
    return runs


@torch.inference_mode()
def refer(floats: Pair, material: Material) -> Reference:
    """Compute the reference results."""
    return Reference(floats.maps(material.pages), floats.texts(material.batches))


def measure(
    devices: Sequence[str],
    material: Material,
    environment: dict[str, Any],
    stage: Stage,
    variants: Sequence[Variant] = networks.VARIANTS,
) -> Results:
    """Run all measurements. Raises DemoError if the networks are not installed."""
    start = time.perf_counter()
    with stage("load the networks", 1) as advance:
        detector, recogniser, characters = networks.load()
        advance()
    runs: list[Run] = []
    on_cpu = Pair(Quantised(detector, {}), Quantised(recogniser, {}), characters, "cpu", torch.float32)
    with stage("read in float32", 1) as advance:
        reference = refer(on_cpu, material)
        advance()
    for device in devices:
        placed = [Quantised(copy.deepcopy(net).to(device, DTYPES[device]), {}) for net in (detector, recogniser)]
        floats = Pair(placed[0], placed[1], characters, device, DTYPES[device])
        runs += measure_device(floats, variants, material, reference, stage)
    page, jpeg = material.pages[0], io.BytesIO()
    page.image.save(jpeg, format="JPEG", quality=80)
    return Results(
        tuple(runs),
        material.describe(),
        environment,
        time.perf_counter() - start,
        jpeg.getvalue(),
        page.image.size,
        page.words,
    )
