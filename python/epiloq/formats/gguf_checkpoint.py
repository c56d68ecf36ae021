"""A GGUF file as a `Checkpoint`, for `convert`: tensors have the names and the order of rows of transformers' model."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from epiloq.files import FULL_OR_FAILED, named_failures
from epiloq.formats.embeddings import SHARED
from epiloq.formats.io.architecture import model_config
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.gguf_file import GgufFile, Stored
from epiloq.formats.io.gguf_model import outline, rows_of, values_of
from epiloq.formats.io.limits import Limits
from epiloq.formats.io.safe_files import reason
from epiloq.formats.io.safetensors_file import NAMES, Entry
from epiloq.formats.layouts import gguf
from epiloq.formats.layouts.gguf_blocks import KINDS

_TOKENIZER = "tokenizer.ggml.model"


class GgufCheckpoint(Checkpoint):
    """A GGUF file opened for reading. A quantised layer has one tensor, its rows of blocks.

    The model's type is the narrowest that holds the others exactly. Raises FormatError as `gguf_model.load` does.
    """

    model: nn.Module
    """On the meta device."""

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self.file = GgufFile(self.folder)
        model, places = outline(self.file, "meta", torch.float32)
        modules = dict(model.named_modules())
        targets = model.state_dict()
        rows = {name: rows_of(self.file, name, model.config, target.shape[0]) for name, target in targets.items()}
        layers, shared, tied = dict[str, str](), dict[str, str](), set[str]()
        first: dict[str, str] = {}
        # Embeddings first, because heads may share their tensor.
        for name in sorted(targets, key=lambda name: not isinstance(_holder(modules, name), nn.Embedding)):
            stored, layer = places[name], name.removesuffix(".weight")
            holds_blocks = isinstance(_holder(modules, name), (nn.Embedding, nn.Linear)) and stored.kind in KINDS
            if stored.name in first:
                tied.add(name)
                if holds_blocks:
                    shared[layer] = first[stored.name].removesuffix(".weight")
                continue
            first[stored.name] = name
            if holds_blocks and name != layer:
                layers[layer] = stored.kind
        own = [name for name in targets if name not in tied]
        floats = {
            name: partial(values_of, self.file, name, places[name], rows[name])
            for name in own
            if name.removesuffix(".weight") not in layers
        }
        dtype = _narrowest(value() for value in floats.values())
        self.model = outline(self.file, "meta", dtype)[0]
        self.files = dict.fromkeys(own, "")
        self.entries = {
            name: _entry(places[name], tuple(targets[name].shape), dtype if name in floats else None) for name in own
        }
        self.computed = {name: partial(_rounded, value, dtype) for name, value in floats.items()}
        self.computed |= {name: partial(_blocks, places[name], rows[name]) for name in own if name not in self.computed}
        self.config = model_config(self.model)
        self.described_by = ""
        self._quantization = {"quant_method": gguf.METHOD, "layers": layers, SHARED: shared} if layers else None
        self.stored, self._layers, self._opened = {}, {}, {}

    @property
    def without_kernel(self) -> list[str]:
        """The kinds of quantised blocks that are dequantised, because no kernel multiplies them."""
        return sorted({tensor.kind for tensor in self.file.tensors.values()} - KINDS.keys() - {"F64", *NAMES.values()})

    @cached_property
    def other_files(self) -> list[Path]:
        """None: a GGUF file has everything in it."""
        return []

    @property
    def limits(self) -> Limits:
        """Limits of the size of a model with this file."""
        return Limits(str(self.folder), len(self.file.tensors), self.file.nbytes)

    def copy_other_files(self, target: Path) -> None:
        """Write the file's tokenizer to a model directory; warn if there is none, or if transformers cannot."""
        if _TOKENIZER not in self.file.values:
            warnings.warn(f"{self.folder}: has no tokenizer: copy that of the original model", stacklevel=3)
            return
        from transformers import AutoTokenizer

        try:
            # apart from other files, which may describe other tokenizers
            with tempfile.TemporaryDirectory() as alone:
                (Path(alone) / "model.gguf").symlink_to(self.folder.resolve())
                tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf", local_files_only=True)
            with named_failures(target):
                tokenizer.save_pretrained(target)
        except Exception as error:  # transformers raises arbitrary errors for tokenizers that it does not convert
            if isinstance(error, OSError) and error.errno in FULL_OR_FAILED:
                raise
            warnings.warn(
                f"{self.folder}: transformers cannot convert the tokenizer ({reason(error)}): copy that of the "
                "original model",
                stacklevel=3,
            )


def _holder(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """The module that has a tensor."""
    return modules[name.rpartition(".")[0]]


def _entry(stored: Stored, shape: tuple[int, ...], dtype: torch.dtype | None) -> Entry:
    """The header entry of a tensor of this type, or of rows of blocks; its size is that in the file."""
    nbytes = len(stored.data)
    return Entry("U8", (shape[0], nbytes // shape[0]), nbytes) if dtype is None else Entry(NAMES[dtype], shape, nbytes)


def _blocks(stored: Stored, rows: Tensor | None) -> Tensor:
    return stored.blocks() if rows is None else stored.blocks()[rows]


def _rounded(values: partial[Tensor], dtype: torch.dtype) -> Tensor:
    return values().to(dtype)


def _narrowest(tensors: Iterable[Tensor]) -> torch.dtype:
    """The first of bfloat16, float16 and float32 that holds every value exactly."""
    left = [torch.bfloat16, torch.float16, torch.float32]
    for tensor in tensors:
        left = [dtype for dtype in left if torch.equal(tensor.to(dtype).float(), tensor)]
    return left[0]
