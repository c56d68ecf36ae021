"""What ``epiloq quantize`` can be refused for before it reads a model's weights: most of what can be wrong."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from epiloq.formats import epiloq_modules
from epiloq.formats.io.architecture import skeleton
from epiloq.formats.io.checkpoint import Checkpoint, carried
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.table import FORMATS
from epiloq.layer_filter import default_filter
from epiloq.mixtures import take_apart_
from epiloq.quantize.algorithms.smoothquant import ALPHA
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.blocks import find_blocks, linears_of
from epiloq.quantize.calibration.static import AUTO
from epiloq.quantize.outputs import choose
from epiloq.quantize.targets import TARGETS
from epiloq.quantize.texts import needs_text
from epiloq.schemes import SCHEMES
from epiloq.weights.grid import Grid

if TYPE_CHECKING:
    from epiloq.quantize.job import Settings


def check_request(settings: Settings) -> None:
    """Raise ValueError for settings that fit no model, or an output that cannot be made."""
    choose(settings.scheme, settings.layout, settings.symmetric)
    output, target = settings.output, TARGETS[settings.scheme]
    if output.exists() or output.is_symlink():
        raise ValueError(f"{output} exists already: choose another output, or move it away")
    nearest = next(folder for folder in output.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise ValueError(f"{output}: expected a place in a folder, but {nearest} is a file")
    if settings.keep_dynamic is not None and not target.static:
        raise ValueError(f"{settings.scheme} has no static scales to keep a layer from (--keep-dynamic)")
    if settings.symmetric and not isinstance(target.base, Grid):
        raise ValueError(f"{settings.scheme} has no integers with zero points to leave out (--symmetric)")
    if not 0 <= settings.alpha <= 1:
        raise ValueError(f"alpha: expected 0 to 1, got {settings.alpha}")
    if settings.alpha != ALPHA and ALGORITHMS[settings.algorithm].fold != "smoothquant":
        raise ValueError(f"{settings.algorithm} is not told an alpha: expected none beside it (--alpha)")
    if needs_text(settings) and settings.calibration is None:
        raise ValueError(f"{settings.scheme} by {settings.algorithm} needs calibration text (--calibration FILE)")


def check_model(settings: Settings, source: Checkpoint) -> int:
    """How many blocks a model has, after comparing the request with its outline, which has no values.

    Raises ValueError: a model that is quantised already, that has no perplexity though it is asked for, no blocks or
    layers to quantise, layers that the scheme or the format cannot take, or names that it does not have.
    """
    if source.quantization is not None:
        raise FormatError(f"{source.folder}: expected a model in floating point, but it is quantised already")
    carried(source.folder)
    outline = skeleton(source, "meta")
    if settings.layout == epiloq_modules.METHOD:  # It has a matrix an expert, even where the model's files stack them.
        take_apart_(outline)
    if settings.evaluation is not None:
        check_generates(outline, settings.model)
    takes = default_filter(outline)
    blocks = find_blocks(outline, takes, settings.blocks)
    layers = {n: layer for name, block in blocks.items() for n, layer in linears_of(block, name, takes).items()}
    _check_layers(settings, source, layers)
    layout, target = FORMATS[settings.layout], TARGETS[settings.scheme]
    shapes = {(layer.out_features, layer.in_features): name for name, layer in reversed(layers.items())}
    for shape, name in sorted(shapes.items()):
        weight, quantization = target.blank(shape, settings.symmetric), target.quantization(settings.symmetric)
        try:
            layout.to_tensors(weight, quantization, next(outline.parameters()).dtype)
        except FormatError as error:
            raise FormatError(f"{settings.model}: {name}: {error}") from error
    pattern = settings.keep_dynamic
    if pattern is not None and pattern != AUTO and not any(fnmatchcase(name, pattern) for name in layers):
        raise ValueError(f"--keep-dynamic: expected {AUTO} or a pattern of layers' names, but none is like {pattern!r}")
    return len(blocks)


def _check_layers(settings: Settings, source: Checkpoint, layers: dict[str, nn.Linear]) -> None:
    scheme = SCHEMES[settings.scheme]
    for name, layer in layers.items():
        entry = source.entries.get(f"{name}.weight")
        if entry is not None and entry.shape != layer.weight.shape:
            raise FormatError(
                f"{source.where(f'{name}.weight')}: config.json disagrees with the tensors: "
                f"expected {list(layer.weight.shape)}, got {list(entry.shape)}"
            )
        try:
            scheme.module.check_convertible(layer, **scheme.options)
        except ValueError as error:
            raise ValueError(f"{settings.model}: {name}: {error}") from error


def check_generates(model: nn.Module, folder: Path) -> None:
    """Raise ValueError unless the model is a causal language model, which perplexity is measured of."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        raise ValueError(f"{folder}: expected a causal language model, got {type(model).__name__}")
