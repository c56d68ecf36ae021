"""Describes a model directory without running the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epiloq.formats import epiloq_modules
from epiloq.formats.configs import modelopt as modelopt_config
from epiloq.formats.convert import refusal
from epiloq.formats.layer_reader import Reader
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.table import FORMATS
from epiloq.models.mixtures import stacked
from epiloq.models.stacked_experts import reason_against
from epiloq.nn import ExpertLinears
from epiloq.nn.base.packed_linear import few_bits_note
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.base.w4a8_layer import GROUPS, STATIC
from epiloq.quantize.targets import TARGETS
from epiloq.weights.fp4 import FORMATS as FP4_FORMATS
from epiloq.weights.grid import Grid


def inspect(layers: Layers) -> dict[str, Any]:
    """Return the facts, ready for JSON; tensors are read only where headers do not suffice.

    kinds
        Layers that share the last part of their name, shapes and quantisation: a row each.
    bytes
        What there is, by type, and what the same model had in floating point.
    formats
        For each format, null if it can represent these layers, else the reason why it cannot. Values are judged by one
        layer of each kind, of which a note tells.
    """
    checkpoint = layers.checkpoint
    formats = {name: refusal(layers, layout) for name, layout in FORMATS.items()} if layers.readers else {}
    after: Counter[str] = Counter()
    for entry in checkpoint.entries.values():
        after[entry.dtype] += entry.nbytes
    return {
        "model": str(checkpoint.folder),
        "architectures": checkpoint.config.get("architectures"),
        "format": layers.format,
        "version": _version(checkpoint.quantization or {}),
        "scheme": _scheme(layers),
        "kinds": _rows(layers),
        "notes": [*_notes(layers), *_judged_by_one(layers, formats)],
        "not_quantised": _not_quantised(layers),
        "tensors": len(checkpoint.entries),
        "files": len(set(checkpoint.files.values())),
        "bytes": {
            "before": _bytes_before(layers),
            "after": sum(after.values()),
            "after_by_dtype": dict(sorted(after.items())),
        },
        "formats": formats,
    }


def check(layers: Layers, advance: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Decode every quantised layer and read every other tensor, one at a time; return the errors by name.

    A layer that its format's rules do not hold for, or values that are not finite.
    """
    found = {}
    for name in (*layers.readers, *layers.rest):
        try:
            values = layers.dequantize(name) if name in layers.readers else layers.checkpoint.tensor(name)
        except FormatError as error:
            found[name] = str(error)
        else:
            if values is not None and values.is_floating_point() and not bool(values.float().isfinite().all()):
                found[name] = f"{layers.checkpoint.where(name)}: holds NaN or infinity"
        advance()
    return found


_DEQUANTISED = {
    "Fp4Linear": "FP4: each call dequantises the weight, but on CUDA for up to 64 tokens of 16 bits, on SM90 for more",
    "W4A8Fp4Linear": "FP4 with 8-bit activations: on CUDA multiplied in bfloat16, but MXFP4 and FP8 (not in groups) in "
    "8 bits for more than 256 tokens (from SM89 on)",
    "TableLinear": "4-bit tables: each call dequantises the weight, but on CUDA for up to 64 tokens",
    "Fp8WeightOnlyLinear": "FP8 weights alone: each call dequantises them, but on CUDA for up to 64 tokens",
}


def _notes(layers: Layers) -> list[str]:
    """Return notes for the user about how layers run."""
    modules = {reader.module[0] for reader in layers.readers.values() if reader.quantization is None}
    return [*(_DEQUANTISED[module] for module in sorted(modules & _DEQUANTISED.keys())), *_few_bits(layers)]


def _judged_by_one(layers: Layers, formats: Mapping[str, str | None]) -> list[str]:
    """Return notes about formats whose support depends on values of layers that were not read."""
    modules = [reader.module[1] for reader in layers.readers.values() if reader.quantization is None]
    layouts = {reader.described.layout for reader in layers.readers.values() if reader.described is not None}
    has_mxfp4 = any(options.get("format") == "mxfp4" for options in modules)
    has_factors = modelopt_config.NVFP4 in layouts or any(options.get("reciprocal") is False for options in modules)
    depends = {
        "deepseek-fp8": (has_mxfp4, "E4M3's range suffices for every block of MXFP4 weights"),
        "compressed-tensors": (has_factors, "float32 has the reciprocal of every global scale"),
    }
    return [
        f"{name}: judged by one layer of each kind; convert checks whether {what}"
        for name, (applies, what) in depends.items()
        if applies and formats.get(name, "") is None
    ]


def _few_bits(layers: Layers) -> list[str]:
    """Return notes about how layers of 2 and 3 bits run on a GPU."""
    found = set()
    for name, reader in layers.readers.items():
        options = reader.module[1]
        bits, group = options.get("bits", 8), options.get("group_size", -1)
        if reader.quantization is not None:
            bits, group = reader.quantization.grid.bits, reader.quantization.grid.group_size
        note = few_bits_note(bits, layers.shape(name)[1], group)
        found |= set() if note is None else {f"{bits} bits: {note}"}
    return sorted(found)


def _rows(layers: Layers) -> list[dict[str, Any]]:
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in sorted(layers.readers):
        columns = _columns(layers, name)
        shape = layers.shape(name)
        kind = name.rpartition(".")[2]
        blank = {"kind": kind, "layers": 0, "shape": list(shape), **columns, "bytes": 0, "bytes_before": 0}
        row = rows.setdefault((kind, shape, *columns.values()), blank)
        row["layers"] += 1
        row["bytes"] += sum(layers.checkpoint.entries[part].nbytes for part in layers.parts[name].values())
        row["bytes_before"] += shape[0] * shape[1] * layers.dtype.itemsize
    return sorted(rows.values(), key=lambda row: (row["kind"], row["shape"]))


def _columns(layers: Layers, name: str) -> dict[str, Any]:
    """Return one layer's quantisation, as columns of the table."""
    reader = layers.readers[name]
    if reader.quantization is not None:
        grid = reader.quantization.grid
        bits, group, symmetric = grid.bits, "channel" if grid.group_size == -1 else grid.group_size, grid.symmetric
        values = (f"int{bits}", bits, group, symmetric, reader.quantization.activations)
    else:
        module, options = reader.module
        values = _VALUES[module](options)
    keys = ("weights", "bits", "group_size", "symmetric", "activations")
    return {**dict(zip(keys, values, strict=True)), "act_order": layers.ordered(name)}


def _spans(block: Sequence[int]) -> str:
    """Name what shares a scale, given its rows and columns (-1: all)."""
    named = {(-1, -1): "tensor", (1, -1): "channel"}
    return named.get((block[0], block[1]), "x".join("all" if size == -1 else str(size) for size in block))


def _integers(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the columns for integers with real offsets, or with inputs that are scaled first."""
    bits, group = options["bits"], options["group_size"]
    return f"int{bits}", bits, "channel" if group == -1 else group, options["zeros"] == "none", None


_ACTIVATIONS = {GROUPS: f"fp8 in groups of {FP8_BLOCK}", STATIC: "fp8 per static"}
"""Kinds of activations of `nn.W4A8Fp4Linear`, as the columns of other classes name them."""
# Columns for modules other than those of integers on a grid: weights, bits, group, symmetric, activations.
_VALUES: dict[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]] = {
    "Fp8BlockLinear": lambda options: (
        "fp8",
        8,
        f"{options.get('rows', FP8_BLOCK)}x{FP8_BLOCK}",
        True,
        f"fp8 in groups of {FP8_BLOCK}",
    ),
    "Fp4Linear": lambda options: (options["format"], 4, FP4_FORMATS[options["format"]].block_size, True, None),
    "W4A8Fp4Linear": lambda options: (
        options["format"],
        4,
        FP4_FORMATS[options["format"]].block_size,
        True,
        _ACTIVATIONS.get(options["activation"], options["activation"]),
    ),
    "Fp8WeightOnlyLinear": lambda options: ("fp8", 8, _spans(options["block"]), True, None),
    "Fp8Linear": lambda options: ("fp8", 8, options["weight"], True, f"fp8 per {options['activation']}"),
    "OnlineQuantLinear": lambda options: (
        f"int{options['bits']}",
        options["bits"],
        options["group_size"],
        options["symmetric"],
        f"int8 in groups of {options['group_size']}",
    ),
    "TableLinear": lambda options: ("4-bit table", 4, options["block_size"], False, None),
    "WeightOnlyLinear": _integers,
    "QuantizedEmbedding": _integers,
}


def _version(found: Mapping[str, Any]) -> str | int | None:
    """Return the format's version or layout that a configuration names."""
    keys = ("checkpoint_format", "version", "format_version", "format", "fmt")
    return next((found[key] for key in keys if key in found), None)


def _scheme(layers: Layers) -> str | None:
    """Return the scheme of the layers; None if they have none, or several."""

    def named(reader: Reader) -> str | None:
        if reader.quantization is None:
            return epiloq_modules.Group(*reader.module, []).scheme
        grid, activations = reader.quantization.grid, reader.quantization.activations
        wanted = (grid.bits, grid.group_size, activations)
        integers = ((t, t.base) for t in TARGETS.values() if isinstance(t.base, Grid))
        return next((t.name for t, base in integers if (base.bits, base.group_size, t.activations) == wanted), None)

    combined = layers.quantization
    found = {named(reader) for reader in layers.readers.values()}
    if combined is not None and combined.dynamic:
        found = {named(reader) for name, reader in layers.readers.items() if name not in combined.dynamic}
    return found.pop() if len(found) == 1 else None


def _bytes_before(layers: Layers) -> int:
    """Bytes of the same model in floating point, of its own type."""
    rest = sum(layers.checkpoint.entries[name].nbytes for name in layers.rest)
    return rest + sum(rows * columns for rows, columns in map(layers.shape, layers.readers)) * layers.dtype.itemsize


def _float_experts(layers: Layers) -> dict[str, str]:
    """Experts in floating point by the name of their module, and why."""
    why = "in floating point in the files"
    alone = {
        name: why
        for name, module in layers.model.named_modules()
        if isinstance(module, ExpertLinears) and any(n.startswith(f"{name}.") for n in layers.unquantised)
    }
    return alone | {name: reason_against(module) or why for name, module in stacked(layers.model).items()}


def _not_quantised(layers: Layers) -> dict[str, Any]:
    entries = layers.checkpoint.entries
    return {
        "linear": layers.unquantised,
        "experts": _float_experts(layers),
        "tensors": len(layers.rest),
        "bytes": sum(entries[name].nbytes for name in layers.rest),
        "largest": sorted(layers.rest, key=lambda name: -entries[name].nbytes)[:3],
    }
