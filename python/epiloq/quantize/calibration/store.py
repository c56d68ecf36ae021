"""Finished blocks of an interrupted run: a directory next to the output, with the settings that produced them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from epiloq.files import write_text
from epiloq.formats.io.safe_files import read_json
from epiloq.formats.layouts.base import FormatError
from epiloq.quantize.calibration.static import InputErrors
from epiloq.quantize.calibration.work import Block
from epiloq.weights.codebooks import Calibrated, Fp4Grid
from epiloq.weights.grid import InputGrid, QuantizedWeight
from epiloq.weights.rounding import Codebook, Parameters

SETTINGS = "settings.json"


class Store:
    """Finished blocks of a run, one safetensors file each, renamed into place when complete.

    settings
        Everything that determines the result, as JSON. A directory with other settings is refused with ValueError.
    grid_of
        The grid of each layer by name.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], grid_of: Callable[[str], Codebook[Calibrated]]
    ) -> None:
        self.folder, self.grid_of = folder, grid_of
        check_resumable(folder, settings)
        file = folder / SETTINGS
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(settings, indent=2) + "\n")
        self._remove_damaged()

    def _remove_damaged(self) -> None:
        """Remove incomplete blocks, as after a power failure; they are computed again."""
        from safetensors import SafetensorError, safe_open

        for file in self.folder.glob("*.safetensors"):
            try:
                with safe_open(file, framework="pt"):
                    pass
            except SafetensorError:
                file.unlink()

    def write(self, block: Block) -> None:
        """Write a finished block."""
        from safetensors.torch import save_file

        temporary = self._file(block.name).with_suffix(".part")
        whole = {name: value.cpu().contiguous() for name, value in tensors_of(block).items()}
        input_errors = {name: asdict(errors) for name, errors in block.input_errors.items()}
        metadata = {"errors": json.dumps(block.errors), "input_errors": json.dumps(input_errors)}
        save_file(whole, temporary, metadata=metadata)
        temporary.replace(self._file(block.name))

    def has(self, name: str) -> bool:
        """Whether a block is stored."""
        return self._file(name).is_file()

    @property
    def kept(self) -> int:
        """Number of stored blocks."""
        return len(list(self.folder.glob("*.safetensors")))

    def read(self, name: str) -> Block | None:
        """Read a block, if it is stored."""
        from safetensors import safe_open

        if not self.has(name):
            return None
        with safe_open(self._file(name), framework="pt") as file:
            keys: list[str] = file.keys()
            tensors = {key: file.get_tensor(key) for key in keys}
            metadata = {name: json.loads(text) for name, text in file.metadata().items()}
        names = [key.removeprefix("q/") for key in tensors if key.startswith("q/")]
        weights = {layer: self._weight(tensors, layer) for layer in names}
        state = {key.removeprefix("state/"): value for key, value in tensors.items() if key.startswith("state/")}
        input_errors = {layer: InputErrors(**errors) for layer, errors in metadata["input_errors"].items()}
        return Block(name, weights, state, metadata["errors"], input_errors)

    def state(self, name: str) -> dict[str, Tensor]:
        """A block's parameters and buffers other than quantised weights, by their names in the block."""
        from safetensors import safe_open

        with safe_open(self._file(name), framework="pt") as file:
            keys: list[str] = file.keys()
            return {key.removeprefix("state/"): file.get_tensor(key) for key in keys if key.startswith("state/")}

    def _weight(self, tensors: Mapping[str, Tensor], layer: str) -> Calibrated:
        parameters = Parameters(tensors[f"scale/{layer}"], tensors.get(f"shift/{layer}"))
        grid, divisor = self.grid_of(layer), tensors.get(f"divisor/{layer}")
        if isinstance(grid, Fp4Grid) and divisor is not None:
            grid = replace(grid, divisor=divisor.item())
        weight = grid.make_weight(tensors[f"q/{layer}"], parameters, tensors.get(f"perm/{layer}"))
        return replace(weight, inputs=_inputs(tensors, layer)) if isinstance(weight, QuantizedWeight) else weight

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def check_resumable(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a directory was created with different settings, does not contain them, or is a file."""
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        kind = "file" if folder.exists() else "broken link"
        raise ValueError(f"{folder}: expected a folder for finished blocks, found a {kind}: move it away")
    file = folder / SETTINGS
    if not file.is_file():
        return
    try:
        wanted, found = json.loads(json.dumps(settings)), read_json(file)
    except FormatError as error:
        raise ValueError(f"{error}; {folder} contains an interrupted run: delete it to start again") from None
    differing = sorted(key for key in wanted if wanted[key] != found.get(key))
    if differing:
        raise ValueError(
            f"{folder} contains an interrupted run with other settings ({', '.join(differing)}): finish it with "
            "those, or delete it"
        )


def tensors_of(block: Block) -> dict[str, Tensor]:
    """A block's tensors by kind and name."""
    tensors: dict[str, Tensor] = {f"state/{name}": value for name, value in block.state.items()}
    for name, weight in block.weights.items():
        tensors |= {f"{part}/{name}": value for part, value in _parts(weight).items() if value is not None}
    return tensors


def _parts(weight: Calibrated) -> dict[str, Tensor | None]:
    scale, shift = weight.parameters
    parts: dict[str, Tensor | None] = {"q": weight.q, "scale": scale, "shift": shift}
    if isinstance(weight, QuantizedWeight):
        parts["perm"] = weight.perm
        if weight.inputs is not None:
            parts |= {"input_scale": weight.inputs.scale, "input_zero": weight.inputs.zero}
    elif isinstance(weight.grid, Fp4Grid) and weight.grid.divisor is not None:
        parts["divisor"] = scale.new_tensor([weight.grid.divisor])
    return parts


def _inputs(tensors: Mapping[str, Tensor], layer: str) -> InputGrid | None:
    if f"input_scale/{layer}" not in tensors:
        return None
    return InputGrid(tensors[f"input_scale/{layer}"], tensors[f"input_zero/{layer}"])
