"""``epiloq quantize --head --embedding``: written, reopened by epiloq and by transformers alone, converted."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra cli")
pytest.importorskip("rich", reason="the command line needs the extra cli")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from packaging.version import Version
from torch import nn

import epiloq
import epiloq.integrations.transformers as integration
from command_line import ROUND, logits, quantize, run, teacher_and_text, text
from epiloq.formats import epiloq_modules
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import FormatError
from epiloq.nn import Fp8Linear, QuantizedEmbedding, WeightOnlyLinear
from tiny_teacher import save, tiny_model

# Other tests want transformers as it is.
integration.unregister()

RTN = ("--algorithm", "rtn", "--scheme")


def untied_teacher(folder: Path) -> Path:
    config = copy.deepcopy(tiny_model(**ROUND).config)
    config.tie_word_embeddings = False
    teacher_and_text(folder, ROUND)
    return save(folder / "apart", transformers.LlamaForCausalLM(config).eval())


def opened(folder: Path) -> Any:
    return models.load(Checkpoint(folder))[0]


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def bytes_of(folder: Path, part: str) -> int:
    entries = Checkpoint(folder).entries
    return sum(entry.nbytes for name, entry in entries.items() if part in name)


@pytest.mark.parametrize(("option", "scheme"), [("--head", "w8a16"), ("--embedding", "w4a16-g32")])
def test_a_tied_pair_is_stored_once(seed: int, tmp_path: Path, option: str, scheme: str) -> None:
    teacher, out = teacher_and_text(tmp_path, ROUND), tmp_path / "out"
    report = tmp_path / "report.json"
    given = (option, scheme, "--evaluation", text(teacher), "--json", report)
    result = run("quantize", teacher, "--output", out, *RTN, "w8a8-int8", *given)
    assert result.exit_code == 0, result.output
    reported = json.loads(report.read_text())["vocabulary"]
    assert (reported["head"], reported["embedding"], reported["tied"], reported["stored_once"]) == (
        scheme,
        scheme,
        True,
        True,
    )
    assert f"embedding {scheme}, head {scheme}, one stored weight: KL" in " ".join(result.output.split())
    page = (out / "report.html").read_text(encoding="utf-8") if (out / "report.html").exists() else None
    assert page is None or "KL of head and embedding" in page
    assert bytes_of(out, "lm_head") == 0 and config_of(out)["tie_word_embeddings"]
    assert config_of(out)["quantization_config"]["shared"] == {"lm_head": "model.embed_tokens"}
    model, before = opened(out), opened(teacher)
    assert model.lm_head.weight_q is model.model.embed_tokens.weight_q
    rounded = copy.deepcopy(before)
    layer = QuantizedEmbedding.from_embedding(before.model.embed_tokens, **epiloq.schemes.SCHEMES[scheme].options)
    # The file's scales are float16.
    values, wanted = (each.packed.dequantize() for each in (model.model.embed_tokens, layer))
    assert float((values - wanted).norm() / wanted.norm()) < (0.01 if scheme == "w8a16" else 0.05)
    # The report's divergence is that of the two layers alone.
    rounded.model.embed_tokens.weight.data = layer.packed.dequantize()
    blocks = copy.deepcopy(model)
    blocks.model.embed_tokens, blocks.lm_head = before.model.embed_tokens, before.lm_head
    p, q = (logits(each).double().log_softmax(-1) for each in (blocks, model))
    assert reported["kl"]["kl_mean"] > 0 and reported["kl"]["tokens"] > 100
    assert float((p.exp() * (p - q)).sum(-1).mean()) < 20 * reported["kl"]["kl_mean"] + 1e-9
    relative = (rounded.model.embed_tokens.weight - before.model.embed_tokens.weight).norm()
    assert reported["errors"]["lm_head"] == pytest.approx(
        float(relative / before.model.embed_tokens.weight.norm()), rel=0.02
    )


def test_without_text_the_cost_is_unknown(seed: int, tmp_path: Path) -> None:
    teacher = teacher_and_text(tmp_path, ROUND)
    result = run("quantize", teacher, "--output", tmp_path / "out", *RTN, "w8a16", "--head", "w8a16")
    assert result.exit_code == 0, result.output
    assert "no text to measure what it costs" in result.output
    calibrated = quantize(teacher, tmp_path / "gptq", "--scheme", "w4a16-g32", "--head", "w8a16")
    assert calibrated.exit_code == 0 and "KL" in calibrated.output, calibrated.output


@pytest.mark.parametrize(
    ("head", "embedding", "kinds"),
    [
        ("w8a16", None, (WeightOnlyLinear, nn.Embedding)),
        (None, "w8a16", (nn.Linear, QuantizedEmbedding)),
        ("fp8-token", "w4a16-g32", (Fp8Linear, QuantizedEmbedding)),
    ],
)
@pytest.mark.parametrize("layout", ["epiloq", "compressed-tensors"])
def test_apart(seed: int, tmp_path: Path, head: str | None, embedding: str | None, kinds: Any, layout: str) -> None:
    teacher = untied_teacher(tmp_path)
    if layout == "compressed-tensors" and embedding == "w4a16-g32":
        pytest.skip("its reader supports only an embedding with the layers' scheme")
    asked = [part for pair in (("--head", head), ("--embedding", embedding)) if pair[1] for part in pair]
    result = run("quantize", teacher, "--output", tmp_path / "out", *RTN, "w8a16", *asked, "--format", layout)
    assert result.exit_code == 0, result.output
    model = opened(tmp_path / "out")
    assert (type(model.lm_head), type(model.model.embed_tokens)) == kinds
    same = epiloq.quantize_(opened(teacher), "w8a16", head=head, embedding=embedding)
    assert float((logits(model) - logits(same)).norm() / logits(same).norm()) < 0.05


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="it opens no quantised embeddings")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32"])
def test_stock_transformers_opens_compressed_tensors(seed: int, tmp_path: Path, tied: bool, scheme: str) -> None:
    pytest.importorskip("compressed_tensors")
    teacher = teacher_and_text(tmp_path, ROUND) if tied else untied_teacher(tmp_path)
    out, given = tmp_path / "out", ("--head", scheme, "--embedding", scheme, "--format", "compressed-tensors")
    result = run("quantize", teacher, "--output", out, *RTN, scheme, *given)
    assert result.exit_code == 0, result.output
    assert ("stored for each of them" in " ".join(result.output.split())) == tied
    assert config_of(out)["tie_word_embeddings"] is False and bytes_of(out, "lm_head") > 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model = opened(out)
    assert isinstance(model.model.embed_tokens, QuantizedEmbedding)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)


def test_a_head_of_another_scheme_in_compressed_tensors(seed: int, tmp_path: Path) -> None:
    """Of a tied model the embedding stays as it is, for stock transformers would not open it."""
    pytest.importorskip("compressed_tensors")
    teacher, out = teacher_and_text(tmp_path, ROUND), tmp_path / "out"
    given = ("--head", "w8a16", "--symmetric", "--format", "compressed-tensors")
    result = run("quantize", teacher, "--output", out, *RTN, "w4a16-g32", *given)
    assert result.exit_code == 0, result.output
    assert "so model.embed_tokens stays as it is" in " ".join(result.output.split())
    model = opened(out)
    assert type(model.model.embed_tokens) is nn.Embedding and model.lm_head.bits == 8
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_opens_and_saves(seed: int, tmp_path: Path, tied: bool, epiloq_in_transformers: None) -> None:
    config = copy.deepcopy(tiny_model(**ROUND).config)
    config.tie_word_embeddings = tied
    transformers.LlamaForCausalLM(config).eval().save_pretrained(tmp_path / "float")
    auto = transformers.AutoModelForCausalLM
    asked = integration.EpiloqConfig("w4a16-g32", head="w8a16", embedding="w8a16")
    model = auto.from_pretrained(tmp_path / "float", quantization_config=asked)
    folders = [tmp_path / str(i) for i in range(2)]
    model.save_pretrained(folders[0])
    again = auto.from_pretrained(folders[0])
    again.save_pretrained(folders[1])
    third = auto.from_pretrained(folders[1])
    for each in (again, third, opened(folders[0])):
        assert torch.equal(logits(each), logits(model))
        assert (each.lm_head.weight_q is each.model.embed_tokens.weight_q) == tied
    only = auto.from_pretrained(tmp_path / "float", quantization_config=integration.EpiloqConfig(head="w8a16"))
    assert type(only.model.layers[0].mlp.up_proj) is nn.Linear and type(only.lm_head) is WeightOnlyLinear


def test_saves_compressed_tensors_again(seed: int, tmp_path: Path, epiloq_in_transformers: None) -> None:
    teacher, out = teacher_and_text(tmp_path, ROUND), tmp_path / "out"
    given = ("--head", "w8a16", "--format", "compressed-tensors")
    assert run("quantize", teacher, "--output", out, *RTN, "w8a16", *given).exit_code == 0
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(out)
    assert isinstance(model.model.embed_tokens, QuantizedEmbedding)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(auto.from_pretrained(tmp_path / "again")), logits(model))
    assert torch.equal(logits(opened(out)), logits(model))


def test_converts_and_inspects(seed: int, tmp_path: Path) -> None:
    model = tiny_model(**ROUND)
    epiloq.quantize_(model, "w8a16", head="w8a16")
    epiloq_modules.save(model, tmp_path / "once")
    for origin, format_name, output in (("once", "compressed-tensors", "twice"), ("twice", "epiloq", "back")):
        result = run("convert", tmp_path / origin, tmp_path / output, "--format", format_name)
        assert result.exit_code == 0, result.output
        assert torch.equal(logits(opened(tmp_path / output)), logits(model))
    assert bytes_of(tmp_path / "twice", "lm_head") > 0 == bytes_of(tmp_path / "once", "lm_head")
    refused = run("convert", tmp_path / "once", tmp_path / "no", "--format", "gptq")
    assert refused.exit_code == 2 and "gptq: cannot represent a quantised embedding" in refused.output
    mixed = epiloq.quantize_(tiny_model(**ROUND), "w4a16-g32", head="w8a16")
    epiloq_modules.save(mixed, tmp_path / "mixed")
    refused = run("convert", tmp_path / "mixed", tmp_path / "no", "--format", "compressed-tensors")
    assert refused.exit_code == 2 and "with the layers' scheme only" in refused.output
    found = run("inspect", tmp_path / "once", "--check", "--json", tmp_path / "inspected.json")
    assert found.exit_code == 0, found.output
    assert "embed_tokens" in {row["kind"] for row in json.loads((tmp_path / "inspected.json").read_text())["kinds"]}
    layers = Layers(Checkpoint(tmp_path / "once"))
    assert layers.unquantised == [] and layers.shape("lm_head") == (256, 64)
    assert torch.equal(layers.dequantize("lm_head"), model.model.embed_tokens.packed.dequantize())


def _kept(config: dict[str, Any]) -> None:
    config["shared"] = {"lm_head": "model.layers.0"}


def _absent(config: dict[str, Any]) -> None:
    config["shared"] = {"model.head": "model.embed_tokens"}


def _other_shape(config: dict[str, Any]) -> None:
    config["shared"] = {"lm_head": "model.embed_tokens", "model.norm": "model.embed_tokens"}


def _missing(config: dict[str, Any]) -> None:
    del config["shared"]


def _list(config: dict[str, Any]) -> None:
    config["shared"] = ["lm_head"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_kept, "shared: expected a layer without tensors and an embedding, got 'lm_head' and 'model.layers.0'"),
        (_absent, r"model\.head: not a layer of this model"),
        (_other_shape, r"model\.norm: expected an embedding or a linear layer \[256, 64\]"),
        (_missing, r"lm_head\.weight: expected a tensor, found none"),
        (_list, r"shared: expected names by name, got \['lm_head'\]"),
    ],
)
def test_bad_directories(seed: int, tmp_path: Path, change: Any, message: str, epiloq_in_transformers: None) -> None:
    model = tiny_model(**ROUND)
    epiloq.quantize_(model, "w4a16-g32", head="w8a16")
    epiloq_modules.save(model, tmp_path / "out")
    config = config_of(tmp_path / "out")
    change(config["quantization_config"])
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=message):
        Layers(Checkpoint(tmp_path / "out"))
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--head", "w4a16-g48"), "--head"),
        (("--embedding", "fp8"), "--embedding"),
        (("--head", "w8a8-int8"), "share one weight: expected one of w8a16"),
        (("--head", "w8a16", "--embedding", "w4a16-g32"), "expected 'w8a16' as for the head"),
        (("--head", "w8a16", "--format", "gptq"), "gptq: cannot represent a quantised embedding"),
        (("--head", "w8a16", "--format", "compressed-tensors"), "zero points of one scheme only; use --symmetric"),
    ],
)
def test_refused_before_anything_is_written(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    teacher = teacher_and_text(tmp_path, ROUND)
    before = sorted(tmp_path.rglob("*"))
    result = run("quantize", teacher, "--output", tmp_path / "out", *RTN, "w4a16-g32", *options)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert sorted(tmp_path.rglob("*")) == before
