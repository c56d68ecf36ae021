"""Randomly damaged model directories and GGUF files: each opens and works, or is refused in one sentence.

EPILOQ_FUZZ=nightly tries 1,000 of each format rather than 50.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import bitsandbytes_layers
import epiloq
import foreign_checkpoints
from command_line import ROUND, letters, run
from epiloq.formats import epiloq_modules
from epiloq.formats.io import model as models
from mutations import Files, change_bytes, change_directory
from tiny_teacher import save, tiny_model

EXAMPLES = 1000 if os.environ.get("EPILOQ_FUZZ") == "nightly" else 50
SECONDS, MEGABYTES = 5.0, 500
SEPARATE_FILES = re.compile(r"warning: |[a-z ]+: \d+/\d+, ")
"""Lines of stderr beside the sentence: how far a command got."""
HANGS = 60  # Seconds of the clock, which other processes share.
fuzzed = settings(
    max_examples=EXAMPLES,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
randoms = st.randoms(use_true_random=False)


def _memory(field: str) -> int:
    """Bytes of one of the lines of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@contextmanager
def bounded() -> Iterator[None]:
    """Fail where something takes too long or too much memory; a mistake ends in an exception, not in all of either."""

    def late(*_: Any) -> None:
        raise AssertionError(f"no answer after {HANGS} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + (3 << 30), limits[1]))
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before, start = _memory("VmRSS"), time.process_time()
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANGS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    spent, grown = time.process_time() - start, _memory("VmHWM") - before
    assert spent < SECONDS and grown < MEGABYTES << 20, f"{spent:.1f} s, {grown >> 20} MiB"


def answers(*arguments: object) -> bool:
    """Whether a command succeeds; if not it has to say why in a sentence."""
    with bounded():
        result = run(*arguments)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    assert result.exit_code in (0, 2), result.output
    if result.exit_code == 2:
        message = [line for line in result.stderr.splitlines() if not SEPARATE_FILES.match(line)]
        assert len(message) == 1 and message[0].startswith(f"epiloq {arguments[0]}: "), result.stderr
    return result.exit_code == 0


def opens(open_it: Callable[[], Any]) -> Any:
    """A model, or None where it is refused."""
    with bounded():
        try:
            return open_it()
        except ValueError as error:
            assert "\n" not in str(error), error
            return None


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The files of a small model in each format."""
    folder = tmp_path_factory.mktemp("formats")
    small = {**ROUND, "num_key_value_heads": 2}

    def model() -> Any:
        return one_layer(tiny_model(**small))

    save(folder / "float", model())
    for name, scheme in (("epiloq", "w4a16-g32"), ("epiloq w8a8", "w8a8-int8"), ("epiloq online", "w4a8-block")):
        epiloq_modules.save(epiloq.quantize_(model(), scheme), folder / name)
    for name, tool, shards in (
        ("compressed-tensors", "pack-quantized", 1),
        ("gptq", "gptq in activation order", 1),
        ("awq", "awq", 2),
        ("deepseek-fp8", "fp8", 1),
    ):
        foreign_checkpoints.write(folder / name, model(), tool, shards=shards)
    for name, kind in (("llm.int8", "int8"), ("nf4", "nf4 nested")):
        foreign_checkpoints.write(folder / name, model(), bitsandbytes_layers.KINDS[kind], shards=1)
    for other in folder.iterdir():
        for file in (folder / "float").glob("tokenizer*"):
            if other.name != "float":
                shutil.copy(file, other)
    return {f.name: {file.name: file.read_bytes() for file in f.iterdir()} for f in folder.iterdir()}


def one_layer(model: Any) -> Any:
    """The model without its other layers."""
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:1]
    return model


NAMES = (
    *("float", "epiloq", "epiloq w8a8", "epiloq online", "compressed-tensors", "gptq", "awq", "deepseek-fp8"),
    *("llm.int8", "nf4"),
)
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("epiloq w8a8", "epiloq online", "llm.int8") else name
    for name in NAMES
]


@pytest.mark.parametrize("name", SLOW)
def test_directories(formats: dict[str, Files], tmp_path: Path, name: str) -> None:
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    text.write_text(letters(300))

    @fuzzed
    @given(rng=randoms)
    def check(rng: Random) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file, data in change_directory(rng, formats[name]).items():
            (folder / file).write_bytes(data)
        before = {file: file.read_bytes() for file in folder.iterdir()}
        if answers("inspect", folder, "--check"):
            answers("eval", folder, "--text", text, "--tokens", 64, "--force")
        else:
            opens(lambda: models.from_directory(folder))
        assert {file: file.read_bytes() for file in folder.iterdir()} == before

    check()


@pytest.mark.parametrize("name", NAMES)
def test_undamaged_directories_work(formats: dict[str, Files], tmp_path: Path, name: str) -> None:
    """What the mutations start from."""
    (tmp_path / "text.txt").write_text(letters(300))
    (tmp_path / "model").mkdir()
    for file, data in formats[name].items():
        (tmp_path / "model" / file).write_bytes(data)
    assert answers("inspect", tmp_path / "model", "--check")
    assert answers("eval", tmp_path / "model", "--text", tmp_path / "text.txt", "--tokens", 64, "--force")


KINDS = {
    "llama": {"attn_": "Q4_0", "ffn_": "Q4_K", "token_embd": "Q8_0", "output": "Q6_K"},
    "qwen3": {"attn_q": "Q5_K", "attn_k": "Q3_K", "attn_v": "Q2_K", "ffn_": "Q5_1", "token_embd": "F16"},
    "gemma3": {"attn_": "Q8_0", "ffn_": "Q4_1", "token_embd": "BF16"},
}


@pytest.mark.parametrize("arch", KINDS)
def test_gguf_files(tmp_path: Path, arch: str) -> None:
    pytest.importorskip("gguf")
    from epiloq.formats.io import gguf_model
    from gguf_files import reference, write

    path = tmp_path / "tiny.gguf"
    write(path, reference(arch, num_hidden_layers=1), arch, KINDS[arch])
    whole = path.read_bytes()
    assert answers("inspect", path, "--check")

    @fuzzed
    @given(rng=randoms)
    def check(rng: Random) -> None:
        data = change_bytes(rng, whole)
        path.write_bytes(data)
        works = answers("inspect", path, "--check")
        model = opens(lambda: gguf_model.load(path))
        assert (model is not None) == works
        if model is not None:
            with bounded(), torch.no_grad():
                model(torch.arange(20)[None])
        assert path.read_bytes() == data

    check()
