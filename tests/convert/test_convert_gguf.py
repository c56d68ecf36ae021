"""`epiloq convert` of GGUF files that the gguf package wrote: the same weights bit for bit, or the reason why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

import gguf as package

from command_line import run
from epiloq.formats import convert
from epiloq.formats.io import gguf_model
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError
from gguf_files import ARCHITECTURES, HIDDEN, VOCABULARY, letter_tokenizer, parts, reference, write

Q4 = {"attn_": "Q4_0", "ffn_": "Q4_0"}
Q8 = {"attn_": "Q8_0", "ffn_": "Q8_0", "token_embd": "Q8_0", "output": "Q8_0"}
Q5 = {"attn_": "Q5_0", "ffn_": "Q5_0"}
Q6 = {"attn_": "Q6_K", "ffn_": "Q6_K"}
Q3 = {"attn_": "Q3_K", "ffn_": "Q3_K"}
Q4_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_": "Q4_K", "ffn_": "Q4_K", "token_embd": "Q4_K", "output": "Q6_K"}
REST = {
    "attn_q": "Q4_1",
    "attn_k": "Q5_0",
    "attn_v": "Q5_1",
    "attn_output": "Q2_K",
    "ffn_": "Q5_K",
    "token_embd": "F16",
}
MIXED = {"attn_": "Q8_0", "ffn_": "Q4_0"}
TO_EPILOQ = {"q4_k_m": Q4_K_M, "rest": REST, "q8_0": Q8}
TO_OTHERS = [
    ("compressed-tensors", "q4_0", Q4),
    ("compressed-tensors", "q8_0", Q8),
    ("compressed-tensors", "q6_k", Q6),
    ("compressed-tensors", "q3_k", Q3),
    ("compressed-tensors", "mixed", MIXED),
    ("gptq", "q4_0", Q4),
    ("gptq", "q5_0", Q5),
    ("gptq", "mixed", MIXED),
    ("awq", "q4_0", Q4),
]
IDS = torch.arange(1, VOCABULARY, 7)[None]


def matrices(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's parameters by name, those of stacked experts one by one, as directories have them."""
    for name, parameter in parts(model):
        stack, _, rest = name.partition(".experts.")
        if not rest:
            yield name, parameter
            continue
        yield from ((f"{stack}.experts.{i}.{rest}", matrix) for i, matrix in enumerate(parameter))


def assert_kept(folder: Path, model: Any, path: Path) -> None:
    """A directory has a file's weights; the gguf package's own values are the model's parameters."""
    layers = Layers(Checkpoint(folder))
    for name, parameter in matrices(model):
        layer = name.removesuffix(".weight")
        if layer in layers.readers:
            assert torch.equal(layers.weight(layer).dequantize(), parameter), name
        else:
            assert torch.equal(layers.checkpoint.tensor(name).float(), parameter), name
    with torch.no_grad():
        opened: Any = models.load(Checkpoint(folder))[0].float()
        expected = gguf_model.load(path)(IDS).logits
        assert torch.equal(opened(IDS).logits, expected)
        torch.testing.assert_close(expected, model(IDS).logits, rtol=0, atol=3e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kinds", TO_EPILOQ)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_epiloqs_format_holds_every_kind(seed: int, tmp_path: Path, arch: str, kinds: str) -> None:
    model, path = reference(arch), tmp_path / "tiny.gguf"
    write(path, model, arch, TO_EPILOQ[kinds])
    report = convert.perform(convert.prepare(path, tmp_path / "out", "epiloq"), largest_shard=400_000)
    each = {"phi3": 4, "qwen3moe": 4 + 3 * 4}.get(arch, 7)
    per_layer = each * model.config.num_hidden_layers
    assert (report["from"], report["to"]) == ("gguf", "epiloq")
    assert report["layers"] == per_layer + {"rest": 0}.get(kinds, 1 if model.config.tie_word_embeddings else 2)
    assert_kept(tmp_path / "out", model, path)


@pytest.mark.parametrize(("target", "name", "kinds"), TO_OTHERS, ids=lambda value: value if type(value) is str else "")
@pytest.mark.parametrize("tied", [True, False])
def test_symmetric_blocks_in_other_formats(
    seed: int, tmp_path: Path, target: str, name: str, kinds: dict[str, str], tied: bool
) -> None:
    model, path = reference("llama", tied=tied), tmp_path / "tiny.gguf"
    write(path, model, "llama", kinds)
    convert.perform(convert.prepare(path, tmp_path / "out", target))
    assert Layers(Checkpoint(tmp_path / "out")).format == target
    assert_kept(tmp_path / "out", model, path)


def test_biases_follow_their_rows(seed: int, tmp_path: Path) -> None:
    model, path = reference("llama", attention_bias=True), tmp_path / "tiny.gguf"
    write(path, model, "llama", Q4)
    convert.perform(convert.prepare(path, tmp_path / "out", "gptq"))
    assert_kept(tmp_path / "out", model, path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_type_is_the_narrowest_that_is_exact(seed: int, tmp_path: Path, dtype: str) -> None:
    model, path = reference("qwen2"), tmp_path / "tiny.gguf"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    write(path, model, "qwen2", {**Q4, "token_embd": {"bfloat16": "BF16", "float16": "F16"}.get(dtype, "F32")})
    convert.perform(convert.prepare(path, tmp_path / "out", "gptq"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert_kept(tmp_path / "out", model, path)


def test_the_command_and_the_tokenizer(seed: int, tmp_path: Path) -> None:
    path, report = tmp_path / "tiny.gguf", tmp_path / "report.json"
    write(path, reference("qwen2"), "qwen2", Q4_K_M, tokenizer=letter_tokenizer)
    (tmp_path / "tokenizer_config.json").write_text("{}")  # of another model
    result = run("convert", path, tmp_path / "out", "--format", "epiloq", "--json", report)
    assert result.exit_code == 0, result.output
    assert "from_pretrained" in result.output and "tokenizer" not in result.output
    assert json.loads(report.read_text())["from"] == "gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("cabb", add_special_tokens=False)["input_ids"] == [ord("c") - 33, 127 - 33, ord("b") - 33]
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("</s>", "{{ messages[0].content }}")
    checked = run("inspect", tmp_path / "out", "--check")
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("kind", [None, "unheard-of"])
def test_a_tokenizer_that_cannot_be_written(seed: int, tmp_path: Path, kind: str | None) -> None:
    def tokenizer(writer: package.GGUFWriter) -> None:
        if kind is not None:
            writer.add_tokenizer_model(kind)

    model, path = reference("llama"), tmp_path / "tiny.gguf"
    write(path, model, "llama", Q4, tokenizer=tokenizer)
    why = "has no tokenizer" if kind is None else r"transformers cannot convert the tokenizer \(.+\)"
    with pytest.warns(UserWarning, match=rf"tiny\.gguf: {why}: copy that of the original model"):
        convert.perform(convert.prepare(path, tmp_path / "out", "epiloq"))
    assert_kept(tmp_path / "out", model, path)


REFUSED = {
    "offsets": ({"ffn_down": "Q4_K"} | Q4, "compressed-tensors", r"mlp\.down_proj: .*real offset .*format epiloq can"),
    "embedding": (Q8, "gptq", r"embed_tokens: gptq: cannot represent a quantised embedding"),
    "8 bits": (MIXED, "awq", r"proj: awq: .*4 bits"),
    "integers": (Q4, "deepseek-fp8", r"proj: deepseek-fp8: cannot represent integers of 4 bits"),
    "products": (Q6, "gptq", r"proj: gptq: .*float16"),
    "ternary": ({"ffn_": "TQ2_0", "attn_": "TQ1_0"}, "epiloq", r"got blocks of kinds .*\(TQ1_0, TQ2_0\); .*gguf_file"),
    "float": ({}, "epiloq", r"expected a quantised model, got one in floating point; .*gguf_file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_cannot_represent(seed: int, tmp_path: Path, case: str) -> None:
    kinds, target, message = REFUSED[case]
    write(tmp_path / "tiny.gguf", reference("llama"), "llama", kinds)
    with pytest.raises(FormatError, match=rf"tiny\.gguf: .*{message}"):
        convert.perform(convert.prepare(tmp_path / "tiny.gguf", tmp_path / "out", target))
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


def test_values_that_are_not_finite(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, reference("llama"), "llama", Q4)
    down = next(tensor for tensor in package.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_down.weight")
    data = bytearray(path.read_bytes())
    at = int(down.data_offset) + 18 * (HIDDEN // 32)
    data[at : at + 2] = b"\x00\x7c"  # infinity in float16
    path.write_bytes(data)
    result = run("convert", path, tmp_path / "out", "--format", "gptq")
    assert result.exit_code == 2 and "layers.1.mlp.down_proj: holds NaN or infinity" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
