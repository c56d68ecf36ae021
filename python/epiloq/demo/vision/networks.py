"""The networks of PP-OCRv4 from the PyPI package rapidocr-onnxruntime, and their quantised forms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

import epiloq
from epiloq.demo import file_of_package
from epiloq.demo.layers import output_errors
from epiloq.demo.vision import ocr, onnx_graph
from epiloq.demo.vision.simplify import simplify
from epiloq.quantize.int8_graph.batch_norm import fold_batch_norm_
from epiloq.quantize.int8_graph.exchange import exchange_int8

PACKAGE = "rapidocr-onnxruntime"
INSTALL = f"pip install --no-deps {PACKAGE}==1.4.4"
DETECTOR, RECOGNISER = "ch_PP-OCRv4_det_infer.onnx", "ch_PP-OCRv4_rec_infer.onnx"


@dataclass(frozen=True)
class Variant:
    """Schemes of a variant's layers. Convolutions whose error exceeds `limit` have the scheme `otherwise` instead."""

    name: str
    convolutions: str
    linears: str
    limit: float | None = None
    otherwise: str = "conv-w8a16"
    observer: str = "mse"


VARIANTS = (
    Variant("int8", "conv-w8a8-int8", "w8a8-int8"),
    Variant("w8a16", "conv-w8a16", "w8a16"),
    Variant("w4a16", "conv-w4a16", "w4a16-g32"),
    Variant("w4a16, w8a16", "conv-w4a16", "w4a16-g32", limit=0.06),
)


@dataclass(frozen=True)
class Quantised:
    """A quantised network, the relative output error of each layer by itself, and the convolutions above the limit."""

    network: nn.Module
    errors: dict[str, float]
    exceptions: tuple[str, ...] = ()

    @property
    def linked(self) -> int:
        """Number of convolutions that pass int8 to the next one."""
        return sum(getattr(layer, "output_scale", None) is not None for layer in self.network.modules())


def find(name: str) -> Path:
    """Find a model file of the installed package, without importing it, which would need onnxruntime and OpenCV."""
    return file_of_package(PACKAGE, name, "the networks", INSTALL)


def load() -> tuple[nn.Module, nn.Module, list[str]]:
    """Load detector and recogniser in fp32, with constants and norms folded, and the recogniser's characters."""
    (detector, _), (recogniser, metadata) = (onnx_graph.load(find(name)) for name in (DETECTOR, RECOGNISER))
    for network in (detector, recogniser):
        fold_batch_norm_(simplify(network))
    return detector, recogniser, ocr.alphabet(metadata)


def quantise(network: nn.Module, variant: Variant, samples: Sequence[Tensor]) -> Quantised:
    """Return a quantised copy, calibrated on the samples if the scheme requires it."""

    def run(model: nn.Module) -> None:
        for sample in samples:
            model(sample)

    def quantised(scheme: str, chosen: Callable[[nn.Module, str], bool], model: nn.Module) -> nn.Module:
        kind = epiloq.schemes.SCHEMES[scheme].layer
        if not any(type(layer) is kind and chosen(layer, name) for name, layer in model.named_modules()):
            return model
        result: nn.Module = epiloq.quantize_(model, scheme, chosen, calibrate=run, observer=variant.observer)
        return result

    whole = quantised(variant.linears, _any, quantised(variant.convolutions, _any, copy.deepcopy(network)))
    errors = output_errors(network, whole, samples[0].dtype, lambda: network(samples[0]))
    exceptions: tuple[str, ...] = ()
    if variant.limit is not None:
        kinds = dict(network.named_modules())
        large = {name for name, error in errors.items() if not error <= variant.limit}
        exceptions = tuple(name for name in errors if name in large and isinstance(kinds[name], nn.Conv2d))
        whole = quantised(variant.convolutions, lambda _, name: name not in exceptions, copy.deepcopy(network))
        whole = quantised(variant.linears, _any, quantised(variant.otherwise, _any, whole))
        errors = output_errors(network, whole, samples[0].dtype, lambda: network(samples[0]))
    if any(isinstance(layer, epiloq.nn.Int8Conv2d) for layer in whole.modules()):
        whole = exchange_int8(whole, calibrate=run)
    return Quantised(whole, errors, exceptions)


def _any(_: nn.Module, name: str) -> bool:
    return True
