"""Hugging Face model directories: safetensors files, checked before use, and written whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from epiloq.formats.layouts import FormatError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LARGEST_SHARD = 5 * 10**9
# What a model directory carries beside its weights: configuration, tokenizer, chat template, licence, notes.
CARRIED = {".json", ".jinja", ".md", ".model", ".txt"}
NOT_CARRIED = {"config.json", INDEX}


class Checkpoint:
    """A model directory opened for reading: which file holds which tensor, every one of them checked to be there.

    Raises FormatError: no config.json, no safetensors weights, an index that names files outside the directory or
    that are missing, a file whose header and length disagree, a tensor that its file does not hold. Pickles are never
    opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_json(folder / "config.json")
        self.files = self._weight_map()

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The ``quantization_config``, if there is one."""
        found = self.config.get("quantization_config")
        if found is not None and not isinstance(found, dict):
            raise FormatError(f"{self.folder / 'config.json'}: quantization_config: expected an object")
        return found

    def headers(self) -> dict[str, tuple[str, list[int]]]:
        """Type, as safetensors names it ("BF16"), and shape of every tensor by name; no tensor is read."""
        found = {}
        for file in sorted(set(self.files.values())):
            with _opened(self.folder / file) as shard:
                for name in (n for n, f in self.files.items() if f == file):
                    part = shard.get_slice(name)
                    found[name] = (part.get_dtype(), list(part.get_shape()))
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, one file after the other."""
        for file in sorted(set(self.files.values())):
            with _opened(self.folder / file) as shard:
                for name in sorted(n for n, f in self.files.items() if f == file):
                    yield name, shard.get_tensor(name)

    def _weight_map(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            found = _read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
                raise FormatError(f"{self.folder / INDEX}: weight_map: expected names of files by names of tensors")
            files: dict[str, str] = found
        elif (self.folder / SINGLE).is_file():
            with _opened(self.folder / SINGLE) as single:
                files = dict.fromkeys(single.keys(), SINGLE)
        else:
            raise FormatError(f"{self.folder}: expected {SINGLE} or {INDEX}, found neither")
        for file in sorted(set(files.values())):
            if PurePosixPath(file).name != file or "\\" in file or not file.endswith(".safetensors"):
                raise FormatError(f"{self.folder / INDEX}: expected safetensors files beside it, got {file!r}")
            if not (self.folder / file).is_file():
                raise FormatError(f"{self.folder / file}: missing, though {INDEX} names it")
            with _opened(self.folder / file) as shard:
                absent = {name for name, holder in files.items() if holder == file} - set(shard.keys())
            if absent:
                raise FormatError(f"{self.folder / file}: expected the tensor {min(absent)}, found none")
        return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{file}: missing") from None
    except ValueError as error:
        raise FormatError(f"{file}: expected JSON: {error}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{file}: expected a JSON object")
    return found


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise FormatError(f"{file}: not a whole safetensors file: {error}") from None


class Writer:
    """Collects tensors into shards of bounded size in a directory, and closes it with an index and a config."""

    def __init__(self, folder: Path, largest_shard: int = LARGEST_SHARD) -> None:
        self.folder, self.largest = folder, largest_shard
        self.shards: list[list[str]] = []
        self.waiting: dict[str, Tensor] = {}
        self.total = 0
        folder.mkdir(parents=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; a full shard is written at once, so that little is held."""
        size = tensor.nbytes
        if self.waiting and sum(t.nbytes for t in self.waiting.values()) + size > self.largest:
            self._flush()
        self.waiting[name] = tensor.detach().cpu().contiguous()
        self.total += size

    def close(self, config: Mapping[str, Any]) -> None:
        """Write what waits, name the shards, and write the index (of several shards) and config.json."""
        self._flush()
        count = len(self.shards)
        names = [SINGLE if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for position, name in enumerate(names):
            self._aside(position).rename(self.folder / name)
        if count > 1:
            weight_map = {tensor: name for name, shard in zip(names, self.shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(self.folder / INDEX, index)
        _write_json(self.folder / "config.json", config)

    def _aside(self, position: int) -> Path:
        return self.folder / f"shard-{position}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if self.waiting:
            save_file(self.waiting, self._aside(len(self.shards)), metadata={"format": "pt"})
            self.shards.append(list(self.waiting))
            self.waiting = {}


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def carry_over(source: Path, target: Path) -> None:
    """Copy what belongs to a model beside weights and configuration: tokenizer and generation files, templates."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in CARRIED and file.name not in NOT_CARRIED:
            shutil.copyfile(file, target / file.name)
