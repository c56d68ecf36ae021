"""Compares algorithms on one model at reduced cost: the same few windows for all, weights rounded in memory.

`scheme_table.py algorithms` measures the rows that are missing, `scheme_table.py teacher` those of a trained model.
Rows of llm-compressor and GPTQModel run those packages' GPTQ, with their default scales, on the same Hessians as
epiloq's rows. They are skipped if the packages are not installed (`pip install --no-deps llmcompressor gptqmodel`, and
the dependencies of GPTQModel's quantisation: logbar, device-smi, pypcre, threadpoolctl).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
import types
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from epiloq.evaluation.divergence import divergence
from epiloq.evaluation.perplexity import perplexity
from epiloq.evaluation.text import first_tokens, load_tokenizer, read_texts, sample, windows
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import load_float
from epiloq.quantize.algorithms import one_weight
from epiloq.quantize.algorithms.gptq import gptq
from epiloq.quantize.algorithms.rotate import rotate_
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.weights.grid import Grid, QuantizedWeight
from epiloq.weights.rounding import Parameters
from scheme_rows import nats

COUNT, LENGTH, EVALUATED, EVALUATED_LENGTH = 8, 256, 3 * 512, 512
GRIDS = {
    "w4a16-g64": Grid(4, 64),
    "w4a16 per channel": Grid(4, -1),
    "w3a16-g64": Grid(3, 64),
    "w2a16-g32": Grid(2, 32),
}
Rounding = Callable[..., QuantizedWeight]
FIRST, FEW_EVALUATED, FEW_LENGTH = 3, 2 * 256, 256
"""Number of blocks in rows of the first blocks, and of the windows that they are evaluated on."""
TEACHER_COUNT = 32
"""Calibration windows for the small teacher, whose rows are cheap."""
AUTOROUND = "autoround"

PEERS: dict[str, Callable[[], Rounding | None]] = {
    "llm-compressor": lambda: llm_compressor(),
    "GPTQModel": lambda: gptqmodel(),
}


class Row(NamedTuple):
    """A grid and an algorithm, for the whole model or its first blocks, with or without rotations."""

    grid: str
    algorithm: str
    first: bool = False
    rotated: bool = False

    @property
    def method(self) -> str:
        return f"{self.algorithm}{' --rotate' if self.rotated else ''}"

    @property
    def name(self) -> str:
        return f"{self.grid} {self.method}{', first blocks' if self.first else ''}"


ROWS = [
    *(Row("w4a16-g64", algorithm) for algorithm in ("gptq", "gptq-guided", "llm-compressor")),
    *(Row("w4a16 per channel", "gptq", rotated=rotated) for rotated in (False, True)),
    *(Row(grid, algorithm, True) for algorithm in ("gptq", "gptq+refine", AUTOROUND) for grid in reversed(GRIDS)),
    *(Row("w4a16-g64", peer, True) for peer in PEERS),
    *(Row(grid, "gptq-guided", True) for grid in reversed(GRIDS)),
]
TEACHER_ROWS = [
    *(Row(grid, algorithm) for algorithm in ("rtn", "gptq") for grid in GRIDS),
    *(Row(grid, f"gptq{more}") for more in ("+refine", "+ranges", "-guided") for grid in GRIDS),
    *(Row(grid, "awq+gptq") for grid in GRIDS),
    *(Row("w4a16 per channel", algorithm, rotated=True) for algorithm in ("rtn", "gptq")),
    *(Row("w4a16-g64", peer) for peer in PEERS),
    *(Row(grid, AUTOROUND) for grid in GRIDS if grid != "w4a16-g64"),
]


def measure(model: Path, texts: Path, row: Row, count: int = COUNT) -> dict[str, Any] | None:
    """Measure perplexity, KL divergence and CPU seconds of a row; None if its package is not installed.

    Calibration uses `count` windows of 256 tokens.
    """
    rounding = PEERS[row.algorithm]() if row.algorithm in PEERS else gptq
    if rounding is None:
        return None
    tokenizer = load_tokenizer(model)
    cut = sample(windows(tokenizer, read_texts(texts / "calibration.txt"), 512), count, 0)
    length, count = (FEW_LENGTH, FEW_EVALUATED) if row.first else (EVALUATED_LENGTH, EVALUATED)
    evaluated = first_tokens(windows(tokenizer, read_texts(texts / "evaluation.txt"), length), count)
    teacher, student = (load_float(Checkpoint(model)).float() for _ in range(2))
    algorithm = ALGORITHMS["gptq" if row.algorithm in PEERS else row.algorithm]
    start = time.process_time()
    if row.rotated:
        rotate_(student)
    with patch.object(one_weight, "gptq", rounding):
        blocks = calibrate(student, [window[:, :LENGTH] for window in cut], GRIDS[row.grid], algorithm)
        for _ in islice(blocks, FIRST if row.first else None):
            pass
    seconds = time.process_time() - start
    return {
        "perplexity": round(perplexity(student, evaluated), 3),
        "kl": round(divergence(teacher, student, evaluated), 7),
        "seconds": round(seconds),
    }


def alone(package: str, parts: Sequence[str], **attributes: Any) -> bool:
    """Allow imports of submodules without running the package's own imports. False if it is not installed."""
    if package in sys.modules:
        return True
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return False
    root = Path(spec.submodule_search_locations[0])
    for part in ("", *parts):
        module: Any = types.ModuleType(f"{package}.{part}".rstrip("."))
        module.__path__ = [str(root / part.replace(".", "/"))]
        sys.modules[module.__name__] = module
    vars(sys.modules[package]).update(attributes)
    return True


def llm_compressor() -> Rounding | None:
    """Its GPTQ instead of epiloq's."""
    if not alone("llmcompressor", ("modifiers", "modifiers.gptq")):
        return None
    theirs: Any = importlib.import_module("llmcompressor.modifiers.gptq.gptq_quantize")
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    qparams: Any = importlib.import_module("compressed_tensors.quantization.utils").calculate_qparams

    def rounded(weight: Tensor, hessian: Tensor, grid: Grid, moments: Tensor | None = None) -> QuantizedWeight:
        rows, columns = weight.shape
        length, grouped = grid.length(columns), grid.group_size != -1
        arguments = quantization.QuantizationArgs(
            num_bits=grid.bits,
            type="int",
            symmetric=False,
            strategy="group" if grouped else "channel",
            group_size=length if grouped else None,
            actorder=quantization.ActivationOrdering.WEIGHT if grouped else None,
        )
        groups = weight.float().view(rows, columns // length, length)
        scale, zero = qparams(groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0), arguments)
        exact = weight.float()[None].clone(), hessian.float()[None].clone()
        values, _, fell_back = theirs.quantize_weight(*exact, scale[None], zero[None], None, arguments)
        assert not fell_back.any()
        # llm-compressor's integers are signed.
        return on_grid(values[0], scale.float(), zero.float() + (1 << (grid.bits - 1)), grid)

    return rounded


def gptqmodel() -> Rounding | None:
    """Its GPTQ instead of epiloq's."""
    if not alone("gptqmodel", ("looper", "models", "nn_modules"), DEBUG_ON=False):
        return None
    theirs: Any = importlib.import_module("gptqmodel.quantization.gptq").GPTQ
    config: Any = importlib.import_module("gptqmodel.quantization.config").QuantizeConfig
    named: Any = importlib.import_module("gptqmodel.looper.named_module").NamedModule

    def rounded(weight: Tensor, hessian: Tensor, grid: Grid, moments: Tensor | None = None) -> QuantizedWeight:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data.copy_(weight)
        asked = config(bits=grid.bits, group_size=grid.group_size, sym=False, desc_act=False, fallback=None)
        task = theirs(named(layer, name="layer", full_name="layer", layer_index=0), asked)
        task.quantizer.configure(perchannel=True)
        matrix = hessian.double() / hessian.diagonal().mean()
        matrix.diagonal().add_(1e-9)
        # GPTQModel takes inputs rather than a Hessian: these have the same sum of products.
        task.add_batch(torch.linalg.cholesky(matrix).t().float()[None], None)
        values, scale, zero, *_ = task.quantize()
        return on_grid(values.float(), scale.float(), zero.float(), grid)

    return rounded


def on_grid(values: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> QuantizedWeight:
    """Convert rounded weights to integers on the grid."""
    rows, columns = values.shape
    codes = (values.view(rows, scale.shape[1], -1) / scale[..., None]).round() + zero[..., None]
    found = grid.make_weight(codes.view(rows, columns).to(torch.uint8), Parameters(scale, zero))
    torch.testing.assert_close(found.dequantize(), values, rtol=0, atol=1e-4)
    return found


def table(found: dict[str, Any], rows: Sequence[Row] = ROWS) -> str:
    """Format KL divergence and perplexity by grid, an algorithm per row."""
    lines = [f"| | {' | '.join(GRIDS)} | seconds of CPU |", f"|---|{'--:|' * (len(GRIDS) + 1)}"]
    for first, algorithm, rotated in dict.fromkeys((row.first, row.algorithm, row.rotated) for row in rows):
        of_grid = [Row(grid, algorithm, first, rotated) for grid in GRIDS]
        seen = [found.get(row.name) for row in of_grid]
        there = [row for row in seen if row is not None]
        if there:
            where = f"first {FIRST} blocks" if first else "whole model"
            cells = ["" if row is None else _cell(row, first) for row in seen]
            lines.append(f"| {where}, {of_grid[0].method} | {' | '.join(cells)} | {_spent(there)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], first: bool) -> str:
    return nats(row["kl"]) if first else f"{nats(row['kl'])} ({row['perplexity']:.2f})"


def _spent(rows: Sequence[dict[str, Any]]) -> str:
    low, high = (choose(row["seconds"] for row in rows) for choose in (min, max))
    return f"{low}" if low == high else f"{low} to {high}"
