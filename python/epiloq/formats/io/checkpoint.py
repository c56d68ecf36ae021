"""Hugging Face model directories: safetensors files, checked before use and written atomically."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from epiloq.files import Held, check_free, held, named_failures
from epiloq.formats.io.described import KEY, SEPARATE_FILES, description, hoisted
from epiloq.formats.io.limits import Limits
from epiloq.formats.io.safe_files import check_encodable, check_folder, check_new, check_regular, read_json, status
from epiloq.formats.io.safetensors_file import Entry, Shard, read_header, read_metadata
from epiloq.formats.layouts.base import FormatError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LARGEST_SHARD = 5 * 10**9
# Weights in any form, and descriptions of weights. All other files are copied to a new directory.
WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors"}
_OF_HQQ = "qmodel.pt"
PICKLES = {".bin", ".ckpt", ".pt", ".pth"}
DESCRIPTIONS = {"config.json", *SEPARATE_FILES}


def split_name(name: str) -> tuple[str, str]:
    """Split a tensor's name into its layer and its part; bitsandbytes' parts have names like "weight.absmax"."""
    layer, found, part = name.partition(".weight.")
    if found:
        return layer, f"weight.{part}"
    layer, _, part = name.rpartition(".")
    return layer, part


class Checkpoint:
    """A model directory opened for reading: the file of each tensor; all tensors are checked to exist.

    Raises FormatError: no config.json; special files (FIFOs, devices, dangling links); no safetensors weights; a single
    file beside an index of others; an index that names missing files or files outside the directory; a file whose
    header and length disagree; a tensor that is not in its file; far more layers than tensors. No pickle is opened.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        check_encodable(self.folder)
        config = self.folder / "config.json"
        self.config = hoisted(read_json(config), config)
        """The content of config.json, a ``quantization_config`` at its top level."""
        check_folder(self.folder)
        self.entries: dict[str, Entry] = {}
        self.files = self._weight_map()
        self.stored: dict[str, str] = {}
        """Names in the files by the names used here, where they differ."""
        self.computed: dict[str, Callable[[], Tensor]] = {}
        """Functions that compute tensors that are not in the files from others, by name."""
        self._layers: dict[str, str] = {}
        self.described_by, self._quantization = description(self.folder, self.config, self.files)
        self._opened: dict[str, Any] = {}
        self._metadata: dict[str, dict[str, str]] = {}
        self.limits.check_config(self.config)

    @cached_property
    def other_files(self) -> list[Path]:
        """Names of the other files that are copied to a new directory of this model. Raises FormatError as the function
        `other_files` does."""
        return other_files(self.folder)

    def copy_other_files(self, target: Path) -> None:
        """Copy the other files: those that existed when `other_files` was first read. Raises FormatError, naming the
        file, for one that has vanished since or is no longer a regular file.
        """
        for name in self.other_files:
            file = self.folder / name
            if status(file) is None:
                raise FormatError(
                    f"{file}: was there when the run began, and is missing now: restore it, or start again"
                )
            check_regular(file)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name)

    @property
    def limits(self) -> Limits:
        """Limits of the size of a model with these files."""
        nbytes = sum(entry.nbytes for entry in self.entries.values())
        return Limits(str(self.folder / "config.json"), len(self.entries), nbytes)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The ``quantization_config``, or the content of the separate file that older AutoGPTQ, AutoAWQ and ModelOpt
        wrote. `described_by` is the name of the file."""
        return self._quantization

    def headers(self) -> dict[str, tuple[str, list[int]]]:
        """dtype, as named by safetensors ("BF16"), and shape of every tensor by name; no tensor is read."""
        return {name: (entry.dtype, list(entry.shape)) for name, entry in self.entries.items()}

    def names(self) -> list[str]:
        """Every tensor's name, one file after the other."""
        return sorted(self.files, key=lambda name: (self.files[name], name))

    def tensor(self, name: str) -> Tensor:
        """One tensor, memory-mapped from its file or computed from mapped ones."""
        if name in self.computed:
            return self.computed[name]()
        return self.read(self.files[name], self.stored.get(name, name))

    def read(self, file: str, stored: str) -> Tensor:
        """One tensor of a file, by its name there."""
        if file not in self._opened:
            self._opened[file] = _opened(self.folder / file)
        return self._opened[file].get_tensor(stored)  # type: ignore[no-any-return]

    def metadata(self, name: str) -> Mapping[str, str]:
        """The texts, by the names that they have there, of the file of a tensor."""
        file = self.files[name]
        if file not in self._metadata:
            self._metadata[file] = read_metadata(self.folder / file)
        return self._metadata[file]

    def close(self) -> None:
        """Close the files. Their memory is released when no tensor refers to it any more."""
        self._opened.clear()

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename all tensors, given new names by names in the files.

        Raises FormatError if two would have the same name.
        """
        taken: dict[str, str] = {}
        for old, new in names.items():
            if new in taken:
                raise FormatError(f"{self.where(old)}: is renamed to {new}, and so is {taken[new]}")
            taken[new] = old
        self.entries = {names[old]: entry for old, entry in self.entries.items()}
        self.files = {names[old]: file for old, file in self.files.items()}
        self.stored = {new: old for old, new in names.items() if new != old}
        # A bias may be stored next to its layer (VideoMAE's q_bias), so only tensors whose last part is the same count.
        parts = [(split_name(new), split_name(old)) for new, old in self.stored.items()]
        self._layers = {new: old for (new, part), (old, same) in parts if part == same}

    def stored_name(self, name: str) -> str:
        """The name of a tensor in the files; also for other tensors of the same layer."""
        if name in self.files:
            return self.stored.get(name, name)
        layer, part = split_name(name)
        return f"{self.stored_layer(layer)}.{part}" if layer else name

    def stored_layer(self, layer: str) -> str:
        """A layer's name in the files, found by its tensors."""
        return self._layers.get(layer, layer)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, one file after the other."""
        return ((name, self.tensor(name)) for name in self.names())

    def where(self, name: str) -> str:
        """File and name of a tensor (or of a layer, by one of its tensors), for messages."""
        file = self.files.get(name) or next((f for n, f in self.files.items() if n.startswith(f"{name}.")), "")
        return f"{self.folder / file}: {self.stored_name(name)}"

    def _of_one_file(self, file: str) -> dict[str, str]:
        self.entries = read_header(self.folder / file)
        return dict.fromkeys(self.entries, file)

    def _weight_map(self) -> dict[str, str]:
        if status(self.folder / INDEX) is not None:
            weight_map = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise FormatError(f"{self.folder / INDEX}: weight_map: expected names of files by names of tensors")
            files: dict[str, str] = weight_map
            if status(self.folder / SINGLE) is not None and set(files.values()) != {SINGLE}:
                # transformers leaves an index, without its files, where it saves a smaller model.
                if not any(status(self.folder / PurePosixPath(file).name) for file in set(files.values())):
                    return self._of_one_file(SINGLE)
                raise FormatError(
                    f"{self.folder}: expected {SINGLE} or {INDEX} with the files that it names, found both: "
                    "transformers reads the first and other tools the second; remove one of them"
                )
        elif status(self.folder / SINGLE) is not None:
            return self._of_one_file(SINGLE)
        elif (named := self._named_by_auto_gptq()) is not None:
            return self._of_one_file(named)
        else:
            raise FormatError(f"{self.folder}: expected {SINGLE} or {INDEX}, found neither{self._other_weights()}")
        for file in sorted(set(files.values())):
            if PurePosixPath(file).name != file or "\\" in file or not file.endswith(".safetensors"):
                raise FormatError(f"{self.folder / INDEX}: expected safetensors files next to it, got {file!r}")
            if status(self.folder / file) is None:
                raise FormatError(f"{self.folder / file}: missing, though {INDEX} names it")
            found = read_header(self.folder / file)
            for name in sorted(name for name, holder in files.items() if holder == file):
                if name not in found:
                    raise FormatError(f"{self.folder / file}: {name}: expected a tensor, found none")
                self.entries[name] = found[name]
        return files

    def _other_weights(self) -> str:
        """The end of an error message: which other weights the directory has, if any."""
        found = sorted(path.name for path in self.folder.iterdir() if path.suffix in WEIGHTS)
        if not found:
            return ""
        if any(re.fullmatch(r".*-\d+-of-\d+\.safetensors", name) for name in found):
            return f", but shards ({found[0]}): expected the index that lists their tensors, too"
        config = self.config.get(KEY)
        method = config.get("quant_method") if isinstance(config, dict) else None
        if found[0] == _OF_HQQ:
            return f", but weights of hqq in another form: {found[0]}: open it by hqq, or quantise the float model"
        pickled = Path(found[0]).suffix in PICKLES
        advice = ": pickles are never opened: save the model again as safetensors" if pickled else ""
        return f", but weights{f' of {method}' if isinstance(method, str) else ''} in another form: {found[0]}{advice}"

    def _named_by_auto_gptq(self) -> str | None:
        """The single weight file named in AutoGPTQ's configuration."""
        if status(self.folder / "quantize_config.json") is None:
            return None
        base = read_json(self.folder / "quantize_config.json").get("model_file_base_name")
        name = f"{base}.safetensors"
        usable = isinstance(base, str) and PurePosixPath(name).name == name and "\\" not in name
        return name if usable and status(self.folder / name) is not None else None


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise FormatError(f"{file}: damaged safetensors file: {error}") from None


class Writer:
    """Writes tensors to shards of bounded size in a directory, then an index and a config.

    Tensors are written immediately and not kept in memory.
    """

    def __init__(self, folder: Path, largest_shard: int = LARGEST_SHARD) -> None:
        self.folder, self.largest = folder, largest_shard
        self.shards: list[Shard] = []
        folder.mkdir(parents=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, to a new shard if it does not fit in the current one."""
        if not self.shards or (self.shards[-1].size and self.shards[-1].size + tensor.nbytes > self.largest):
            if self.shards:
                self.shards[-1].close()
            self.shards.append(Shard(self._aside(len(self.shards))))
        self.shards[-1].add(name, tensor)

    def close(self, config: Mapping[str, Any]) -> None:
        """Finish and name the shards, and write the index (if there are several shards) and config.json."""
        if self.shards:
            self.shards[-1].close()
        count = len(self.shards)
        names = [SINGLE if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for position, name in enumerate(names):
            self._aside(position).rename(self.folder / name)
        if count > 1:
            shards = zip(names, self.shards, strict=True)
            weight_map = dict(sorted((tensor, name) for name, shard in shards for tensor in shard.entries))
            index = {"metadata": {"total_size": sum(shard.size for shard in self.shards)}, "weight_map": weight_map}
            _write_json(self.folder / INDEX, index)
        _write_json(self.folder / "config.json", config)

    def _aside(self, position: int) -> Path:
        return self.folder / f"shard-{position}.safetensors"


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """Create a temporary directory next to a new `folder`. It is renamed to `folder` on success and removed otherwise.

    Remains of killed processes are removed, too. Raises FormatError if `folder` exists or cannot be created,
    FileExistsError if another process created it meanwhile.
    """
    folder = Path(folder)
    check_new(folder)
    _remove_abandoned(folder)
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        with named_failures(folder, temporary), held(_lock(temporary)):
            yield temporary
            if folder.exists() or folder.is_symlink():
                raise FileExistsError(f"{folder} was created in the meantime: choose another output, or move it away")
            temporary.rename(folder)
    finally:
        _remove(temporary)


def _lock(temporary: Path) -> Path:
    """The lock file of the process that writes a folder."""
    return temporary.with_name(f"{temporary.name}.lock")


def _remove(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    _lock(temporary).unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove abandoned temporary directories of a folder, those whose process has ended."""
    for lock in folder.parent.glob(f".{glob.escape(folder.name)}-????????.lock"):
        with suppress(Held):
            check_free(lock)
            _remove(lock.with_suffix(""))


def other_files(source: Path) -> list[Path]:
    """A model's files other than weights and configuration, relative to its directory: tokenizer, generation settings,
    templates, notes, code. Hidden files, linked folders and folders with separate models are excluded. Raises
    FormatError for a special file, a dangling link, or a directory that has vanished, and PermissionError for a file
    that may not be read.
    """
    found: list[Path] = []
    for place, folders, files in os.walk(source, onerror=_raise):
        here = Path(place).relative_to(source)
        if here != Path() and "config.json" in files and any(Path(name).suffix in WEIGHTS for name in files):
            folders.clear()
            continue
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        for name in sorted(files):
            described = here == Path() and (name in DESCRIPTIONS or name.endswith(".index.json"))
            if not described and not name.startswith(".") and Path(name).suffix not in WEIGHTS:
                file = source / here / name
                check_regular(file)
                if not os.access(file, os.R_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
                found.append(here / name)
    return found


def _raise(error: OSError) -> None:
    raise FormatError(f"{error.filename}: cannot be read any more: {error.strerror}") from error
