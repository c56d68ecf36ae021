"""transformers language models from GGUF files; quantised layers use the integers of the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from epiloq.formats.io.gguf_config import ARCHITECTURES, EMBEDDING, LONG_FACTORS, ROPE_FACTORS, config_of
from epiloq.formats.io.gguf_file import GgufFile, Stored
from epiloq.formats.io.limits import Limits
from epiloq.formats.io.safe_files import reason
from epiloq.formats.layouts import gguf
from epiloq.formats.layouts.base import FormatError, located
from epiloq.formats.layouts.gguf_blocks import KINDS
from epiloq.models.in_memory import describe_on_saving
from epiloq.models.mixtures import release_float_experts_, restack_experts_, unstack_experts_
from epiloq.nn import OnlineQuantLinear, QuantizedEmbedding, WeightOnlyLinear
from epiloq.nn.quantized_embedding import factor_of
from epiloq.vocabulary import forget_ties

_HEAD = "lm_head.weight"


@torch.no_grad()
def load(
    path: str | Path, *, activations: Literal["int8"] | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Load the model of a GGUF file, in evaluation mode on the CPU.

    Linear layers with a kind of block in ``gguf_blocks.KINDS`` become ``WeightOnlyLinear`` or, with int8 activations,
    ``OnlineQuantLinear``. An embedding of such a kind becomes a ``QuantizedEmbedding``; an output head tied to it
    shares its weight, or has a copy with int8 activations. All other tensors, and layers of other kinds, are
    dequantised and rounded to `dtype`.

    Args:
        path: a file of one of the architectures llama, qwen2, qwen3, qwen3moe, phi3, granite, gemma, gemma2, gemma3.
        activations: "int8" quantises them in the weight's groups at run time; None leaves them in floating point.
        dtype: float32, float16 or bfloat16.

    Raises:
        FormatError: an unsupported architecture; an unknown parameter; a tensor that is missing, unused, of another
            shape, or not finite.
    """
    file = GgufFile(Path(path))
    model, places = outline(file, "cpu", dtype)
    linears = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    tables = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    quantised: list[tuple[str, Stored, Tensor | None]] = []
    for name, target in model.state_dict(keep_vars=True).items():
        stored, rows = places[name], rows_of(file, name, model.config, target.shape[0])
        if (name in linears or name in tables) and stored.kind in KINDS:
            quantised.append((name, stored, rows))
            continue
        target.copy_(values_of(file, name, stored, rows))
    looked_up: dict[str, QuantizedEmbedding] = {}
    # Embeddings first, because heads may share their weights.
    for name, stored, rows in sorted(quantised, key=lambda found: found[0] not in tables):
        layer: nn.Module
        with located(f"{file.path}: {stored.name}"):
            if name in tables:
                layer = looked_up[stored.name] = _table(tables[name], stored, dtype)
            elif activations is None and stored.name in looked_up:
                layer = looked_up[stored.name].tied_linear(linears[name].bias)
            else:
                layer = _layer(linears[name], stored, rows, activations)
        model.set_submodule(name.removesuffix(".weight"), layer.train(False))
    forget_ties(model, tuple(name.removesuffix(".weight") for name, _, _ in quantised))
    restack_experts_(model)
    release_float_experts_(model)
    if quantised:
        describe_on_saving(model)
    return model  # type: ignore[no-any-return]


def outline(file: GgufFile, device: str, dtype: torch.dtype) -> tuple[Any, dict[str, Stored]]:
    """The model that a file describes, uninitialised, and the file's tensor for each of its tensors.

    Raises FormatError, before anything is allocated, if they disagree.
    """
    import gguf as package
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM
    limits = Limits(str(file.path), len(file.tensors), file.nbytes)

    def built(device: str) -> Any:
        try:
            with torch.device(device), limits.while_building():
                model = classes.from_config(config, dtype=dtype).eval()
                unstack_experts_(model)
                return model
        except FormatError:
            raise
        except Exception as error:
            raise FormatError(f"{file.path}: transformers cannot build the model: {reason(error)}") from error

    try:
        config = config_of(file)
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"{file.path}: transformers cannot describe the model: {reason(error)}") from error
    model = built("meta")
    arch = next(key for key, name in package.MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = package.get_tensor_name_map(arch, config.num_hidden_layers)
    unused, places = set(file.tensors) - {ROPE_FACTORS, *LONG_FACTORS}, {}
    for name, target in model.state_dict().items():
        layer, expert = _of_expert(name)
        stored = file.tensors.get(names.get_name(layer, try_suffixes=(".weight", ".bias")) or "")
        if stored is None and name == _HEAD and config.tie_word_embeddings:
            stored = file.tensors[EMBEDDING]
        if stored is None:
            raise FormatError(f"{file.path}: {name}: expected a tensor, found none")
        stack = () if expert is None else (config.num_experts,)
        if stored.shape != (*stack, *target.shape):
            wanted = [*stack, *target.shape]
            raise FormatError(f"{file.path}: {stored.name}: expected {wanted}, got {list(stored.shape)}")
        unused.discard(stored.name)
        places[name] = stored if expert is None else stored.part(expert)
    if unused:
        raise FormatError(f"{file.path}: {min(unused)}: not a tensor of this model")
    limits.check_size(model)
    return (model if device == "meta" else built(device)), places


def _of_expert(name: str) -> tuple[str, int | None]:
    """The name of the stack to which an expert's matrix belongs, and the expert's number; other names as they are."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)(\.\w+\.weight)", name)
    return (name, None) if found is None else (f"{found[1]}{found[3]}", int(found[2]))


def values_of(file: GgufFile, name: str, stored: Stored, rows: Tensor | None) -> Tensor:
    """The values, float32, of a tensor of the model. Raises FormatError for NaN, infinity and unknown kinds."""
    with located(file.path):
        values = stored.dequantize()
    if name.endswith("norm.weight"):
        values = values - ARCHITECTURES[file.architecture].norm_offset
    return values if rows is None else values[rows]


def rows_of(file: GgufFile, name: str, config: object, count: int) -> Tensor | None:
    """The file's row for each row of a layer; None if they are in order."""
    layer, rotated = name.split(".")[-2], ARCHITECTURES[file.architecture].rotated
    if layer not in rotated:
        return None
    heads = getattr(config, rotated[layer])
    return torch.arange(count).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _layer(linear: nn.Linear, stored: Stored, rows: Tensor | None, activations: str | None) -> nn.Module:
    blocks = stored.blocks() if rows is None else stored.blocks()[rows]
    shape = (linear.out_features, linear.in_features)
    if activations is None:
        packed = gguf.to_packed(blocks, kind=stored.kind, shape=shape)
        gguf.check_finite(packed.scale, packed.offset)
        return WeightOnlyLinear.from_packed(packed, linear.bias)
    online = gguf.to_online(blocks, kind=stored.kind, shape=shape)
    gguf.check_finite(online.scale, online.offset)
    return OnlineQuantLinear.from_prepared(online, linear.bias)


def _table(table: nn.Embedding, stored: Stored, dtype: torch.dtype) -> QuantizedEmbedding:
    shape = (table.num_embeddings, table.embedding_dim)
    packed = gguf.to_packed(stored.blocks(), kind=stored.kind, shape=shape)
    gguf.check_finite(packed.scale, packed.offset)
    factor, rounded = factor_of(table)
    scale: dict[str, Any] = {"embed_scale": factor, "embed_scale_rounded": rounded}
    layer = QuantizedEmbedding.from_packed(packed, table.padding_idx, **scale, dtype=dtype)
    layer.hold_scales_in_dtype_()
    return layer
