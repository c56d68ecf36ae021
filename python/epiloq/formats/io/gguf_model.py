"""Language models of transformers from GGUF files, whose quantised layers run on the integers in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from epiloq.formats.layouts import gguf
from epiloq.formats.layouts.base import FormatError
from epiloq.formats.layouts.gguf import KINDS, GgufFile, Stored
from epiloq.nn import OnlineQuantLinear, WeightOnlyLinear

# Architectures by their GGUF name, and the layers whose rows llama.cpp reorders: pairs that rotate together lie side by
# side there, and half a head apart in transformers.
ROTATED = {"llama": {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}}


@torch.no_grad()
def load(
    path: str | Path, *, activations: Literal["int8"] | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model of a GGUF file, in evaluation mode on the CPU.

    Linear layers of Q4_0, Q4_1 or Q8_0 blocks become ``WeightOnlyLinear`` or, with int8 activations,
    ``OnlineQuantLinear``, and so does an output head that shares such blocks with the embedding. All other tensors,
    embeddings and layers of other kinds too, are de-quantised into `dtype`.

    Args:
        path: a file of architecture "llama".
        activations: "int8" quantises them in the same blocks of 32 at run time; None leaves them in floating point.
        dtype: float32, float16 or bfloat16.

    Raises:
        FormatError: another architecture; a tensor that is missing, that the model has not, or of another shape.
    """
    import gguf as package
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(path)
    file = GgufFile(path)
    if file.architecture not in ROTATED:
        known = ", ".join(ROTATED)
        raise FormatError(f"{path}: general.architecture: expected one of {known}, got {file.architecture}")
    classes: Any = AutoModelForCausalLM
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    model: nn.Module = classes.from_config(config, dtype=dtype).eval()
    arch = next(key for key, name in package.MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = package.get_tensor_name_map(arch, config.num_hidden_layers)
    unused = dict(file.tensors)
    quantised: list[tuple[str, Stored, Tensor | None]] = []
    linears = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, target in model.state_dict(keep_vars=True).items():
        stored = _find(file, names.get_name(name, try_suffixes=(".weight", ".bias")), config.tie_word_embeddings)
        if stored is None:
            raise FormatError(f"{path}: {name}: expected a tensor, found none")
        if stored.shape != tuple(target.shape):
            raise FormatError(f"{path}: {stored.name}: expected {list(target.shape)}, got {list(stored.shape)}")
        unused.pop(stored.name, None)
        rows = _rows(file.architecture, name, config, target.shape[0])
        if name in linears and stored.kind in KINDS:
            quantised.append((name, stored, rows))
        else:
            values = stored.dequantize()
            target.copy_(values if rows is None else values[rows])
    if left := sorted(unused.keys() - {"rope_freqs.weight"}):
        raise FormatError(f"{path}: {left[0]}: not a tensor of this model")
    for name, stored, rows in quantised:
        _replace(model, name.removesuffix(".weight"), linears[name], stored, rows, activations)
    return model


def _find(file: GgufFile, name: str | None, tied: bool) -> Stored | None:
    found = file.tensors.get(name or "")
    return file.tensors.get("token_embd.weight") if found is None and name == "output.weight" and tied else found


def _rows(architecture: str, name: str, config: object, count: int) -> Tensor | None:
    """Which row of the file is each row of a layer; None for all in order."""
    layer = name.split(".")[-2]
    if layer not in ROTATED[architecture]:
        return None
    heads = getattr(config, ROTATED[architecture][layer])
    return torch.arange(count).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _replace(
    model: nn.Module, name: str, linear: nn.Linear, stored: Stored, rows: Tensor | None, activations: str | None
) -> None:
    blocks = stored.blocks() if rows is None else stored.blocks()[rows]
    shape = (linear.out_features, linear.in_features)
    layer: nn.Module
    if activations is None:
        layer = WeightOnlyLinear.from_packed(gguf.to_packed(blocks, kind=stored.kind, shape=shape), linear.bias)
    else:
        layer = OnlineQuantLinear.from_prepared(gguf.to_online(blocks, kind=stored.kind, shape=shape), linear.bias)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer.train(linear.training))
