"""Ranks that cannot share a model, by gloo on a CPU: each is refused on every rank, and a dead one ends the others."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from transformers.distributed import DistributedConfig

import epiloq
import epiloq.integrations.transformers as integration
from epiloq import environment
from epiloq.formats import epiloq_modules
from epiloq.integrations.hf_quantizer import parallel
from epiloq.nn import ExpertLinears, Int8Linear
from epiloq.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel
from gloo_ranks import SECONDS, Ranks
from opened_models import logits
from tiny_mixtures import qwen3

integration.unregister()
pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)
# The function in which a rank dies.
DEATHS: dict[str, tuple[Any, str]] = {
    "while files are compared": (parallel, "_fingerprint"),
    "before its layers are opened": (parallel.Split, "open_"),
    "in the forward pass": (transformers.models.llama.modeling_llama.LlamaMLP, "forward"),
    "while layers are gathered": (parallel, "bare"),
    "while floating-point tensors are gathered": (parallel.Split, "gathered"),
}


def _die(*arguments: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small quantised model with an output head in floating point, which transformers divides."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        vocab_size=192,
        tie_word_embeddings=False,
    )
    made: Path = tmp_path_factory.mktemp("bad") / "model"
    model = epiloq.quantize_(transformers.LlamaForCausalLM(config).eval(), "w4a16-g32")
    epiloq_modules.save(model, made)
    return made


def opened(folder: Path, world: int, **plan: str) -> Any:
    integration.register()
    asked = DistributedConfig(tp_size=world, tp_plan=plan or "auto")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=asked)


@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_dies(folder: Path, tmp_path: Path, death: str) -> None:
    target = tmp_path / "saved"

    def run(rank: int) -> None:
        if rank == 1:
            setattr(*DEATHS[death], _die)
        model = opened(folder, 2)
        logits(model)
        model.save_pretrained(target)

    ranks = Ranks(tmp_path, 2, run)
    assert ranks.codes == [3, -signal.SIGKILL] and ranks.seconds < SECONDS
    assert re.fullmatch(r"ConnectionError: epiloq\.parallel: [^\n]*one has ended: (?!.*\. )[^\n]*", ranks.message(0))
    assert not target.exists() or list(target.iterdir()) == []


def test_a_rank_leaves_before_the_others_ask(folder: Path, tmp_path: Path) -> None:
    """One whose directory is not there ends with an error of transformers; the others hear that it is gone."""
    ranks = Ranks(tmp_path, 2, lambda rank: opened(folder if rank == 0 else tmp_path / "none", 2))
    assert ranks.codes == [3, 3] and ranks.seconds < SECONDS
    assert ranks.message(0).startswith("ConnectionError: epiloq.parallel: ")


def _threads(rank: int, own: Path) -> None:
    """Told only: a forked process that used several threads would wait for ever."""
    parallel.arithmetic = lambda device: {"threads": str(1 + rank)}  # type: ignore[attr-defined]


def _sets(rank: int, own: Path) -> None:
    os.environ["ONEDNN_MAX_CPU_ISA"] = ["AVX2", "SSE41"][min(rank, 1)]


def _device(rank: int, own: Path) -> None:
    name = ["NVIDIA H100", "NVIDIA L4"][min(rank, 1)]
    parallel.arithmetic = lambda device: {"device": name}  # type: ignore[attr-defined]


def _short(rank: int, own: Path) -> None:
    file = next(own.glob("*.safetensors"))
    if rank == 1:
        file.write_bytes(file.read_bytes()[:-100])


def _without(rank: int, own: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = next(own.glob("*.safetensors"))
    if rank == 1:
        kept = {k: v for k, v in load_file(file).items() if k != "model.layers.1.mlp.up_proj.weight_scale"}
        save_file(kept, file, {"format": "pt"})


Change = Callable[[int, Path], None]
REFUSED: dict[str, tuple[Change, str]] = {
    "threads": (_threads, "expected the same threads on every rank, but rank 1 has 2 and rank 0 has 1"),
    "instruction sets": (
        _sets,
        r"same instruction sets on every rank, but rank 1 has .*up to SSE41 and rank 0 .*to AVX2",
    ),
    "device": (_device, "expected the same device on every rank, but rank 1 has NVIDIA L4 and rank 0 has NVIDIA H"),
    "a file cut off": (_short, "model.safetensors"),
    "a tensor that one lacks": (
        _without,
        "expected the same directory on every rank, but rank 1 has a different one than rank 0",
    ),
}


def test_ranks_that_differ_are_refused_on_all(folder: Path, tmp_path: Path) -> None:
    """On three ranks, one after the other in the same processes, which go on after each refusal."""

    def run(rank: int) -> None:
        before = parallel.arithmetic  # type: ignore[attr-defined]
        for change, expected in REFUSED.values():
            own = tmp_path / f"own-{rank}"
            shutil.copytree(folder, own)
            change(rank, own)
            with pytest.raises(ValueError, match=expected):
                opened(own, 3)
            os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
            parallel.arithmetic = before  # type: ignore[attr-defined]
            shutil.rmtree(own)
        opened(folder, 3)

    Ranks(tmp_path, 3, run).check()


def test_styles_and_sizes_that_are_refused(folder: Path, tmp_path: Path) -> None:
    def run(rank: int) -> None:
        plan = {"model.layers.*.mlp.gate_proj": "packed_colwise"}
        with pytest.raises(ValueError, match=r"mlp\.gate_proj: expected of a quantised layer colwise, .*got packed_co"):
            opened(folder, 2, **plan)
        mesh, layer = init_device_mesh("cpu", (2,)), Int8Linear.from_linear(nn.Linear(1, 1))
        for style, what in ((ColwiseParallel(), "1 output features"), (RowwiseParallel(), "1 input features")):
            with pytest.raises(ValueError, match=f"each gets some of {what}, got 2"):
                parallelize_module(layer, mesh, style)
        one = ExpertLinears([{name: layer for name in ("gate", "up", "down")}], nn.SiLU())
        with pytest.raises(ValueError, match="each gets some of 1 experts, got 2"):
            parallelize_module(one, mesh, ExpertParallel())

    Ranks(tmp_path, 2, run).check()


def test_parts_divided_by_hand_are_not_saved(folder: Path, tmp_path: Path) -> None:
    """Nor by quantised models that were not opened from a directory."""

    def run(rank: int) -> None:
        mesh, target = init_device_mesh("cpu", (2,)), tmp_path / f"saved-{rank}"
        integration.register()

        def refused(model: Any, name: str, style: Any, expected: str) -> None:
            parallelize_module(model.get_submodule(name), mesh, style)
            expected = rf"{name}.*: expected a whole layer to save, got a part \({expected}\): save the model before"
            with pytest.raises(ValueError, match=expected):
                model.save_pretrained(target)
            assert not list(target.glob("*"))

        for style, sizes in (
            (ColwiseParallel(), r"\[80, 96\] of \[160, 96\]"),
            (RowwiseParallel(), r"\[160, 48\] of .*"),
        ):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            refused(model, "model.layers.1.mlp.up_proj", style, sizes)
        with pytest.raises(ValueError, match="expected a whole layer to save"):
            epiloq_modules.save(model, target / "own")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        refused(model, "lm_head", ColwiseParallel(), r"\[96, 96\] of \[192, 96\]")
        mixture = epiloq.quantize_(qwen3(), "w8a16")
        refused(mixture, "model.layers.1.mlp.experts", ExpertParallel(), "2 of 4 experts")

    Ranks(tmp_path, 2, run).check()


def test_arithmetic_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment.arithmetic()
    assert found["threads"] == str(torch.get_num_threads())
    assert found["instruction sets"].startswith(torch.backends.cpu.get_cpu_capability())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert environment.arithmetic()["instruction sets"] == found["instruction sets"] + ", oneDNN up to AVX2"
