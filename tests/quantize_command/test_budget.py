"""``epiloq quantize --bytes`` and ``--bits``: the choice, what it writes, who reads that, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

import transformers
from safetensors.torch import load_file

import epiloq.integrations.transformers as integration
from command_line import ROUND, letters, logits, quantize, run, teacher_and_text
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.nn import WeightOnlyLinear
from epiloq.quantize import job as jobs
from epiloq.quantize import report as report_page
from epiloq.quantize.budget import amount, candidates, search
from tiny_teacher import save, sharpen, tiny_model

# Other tests want transformers as it is.
integration.unregister()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of its layers matter more than others."""
    folder = tmp_path_factory.mktemp("teacher")
    path = teacher_and_text(folder, ROUND)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    sharpen(model)
    model.save_pretrained(path)
    return path


def layers_of(folder: Path) -> dict[str, WeightOnlyLinear]:
    model, _ = models.load(Checkpoint(folder))
    return {name: m for name, m in model.named_modules() if isinstance(m, WeightOnlyLinear)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bytes", "1kB"), r"need --bytes 0\.\d+MB, 0\.\d MB of them for what stays"),
        (("--bits", 4.01), r"need --bits \d\.\d+; or add smaller --candidates, such as w3a16-g32\n"),
        (("--bits", 3.01, "--candidates", "w3a16-g32"), r"or add smaller --candidates, such as w3a16\n"),
        (("--bits", 2.01, "--candidates", "w2a16-g32"), r"or add smaller --candidates, such as w2a16\n"),
        (("--bits", 2.01, "--candidates", "w2a16"), r"the smallest of w2a16 need --bits \d\.\d+\n"),
        (
            ("--bits", 3),
            r"--bits: expected at least 4, the fewest of w4a16, .*w8a16, and the bits of its scales, got 3\n",
        ),
        (("--bits", "nan"), "--bits: expected at least 4"),
        (("--bits", -1), "--bits: expected at least 4"),
        (("--bytes", "many"), "--bytes: expected a number and a unit"),
        (("--bytes", "1MB", "--bits", 5), "expected one of --scheme, --bytes, --bits, got --bytes and --bits"),
        (("--bytes", "1MB", "--scheme", "w8a16"), "got --scheme and --bytes"),
        ((), "expected one of --scheme, --bytes, --bits, got none"),
        (("--scheme", "w8a16", "--candidates", "w8a16"), "--candidates: expected --bytes or --bits with it"),
        (("--bits", 5, "--candidates", "w5a16-g32"), r"--candidates: expected w<bits>a16 .* got 'w5a16-g32'"),
        (("--bits", 5, "--candidates", "fp8"), "got 'fp8'"),
        (("--bits", 5, "--candidates", "w4a16-g0"), "got 'w4a16-g0'"),
        (("--bits", 8, "--candidates", "w4a16-g48"), "can represent none of w4a16-g48 for .*: add w8a16"),
        (("--bits", 5, "--format", "awq"), "awq: a budget gives layers different schemes; use --format compressed"),
        (("--bits", "4.5", "--algorithm", "autoround"), "trains all layers of a block in one scheme"),
        (
            ("--bytes", "1MB", "--embedding", "w8a16", "--format", "compressed-tensors"),
            "an embedding with the layers' scheme, and a budget has several; type --format epiloq",
        ),
    ],
)
def test_refused(teacher: Path, tmp_path: Path, options: tuple[object, ...], message: str) -> None:
    result = quantize(teacher, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert re.search(message, result.output), result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "printed"), [("7B", "0.01kB"), ("1kB", "1kB"), ("1234B", "1.24kB"), ("0.1MB", "0.1MB"), ("2GB", "2000MB")]
)
def test_budgets_are_printed_as_large_as_they_are(given: str, printed: str) -> None:
    assert amount.megabytes(amount.parse_bytes(given)) == printed


@pytest.mark.slow
def test_suggested_budgets_are_possible(teacher: Path, tmp_path: Path) -> None:
    refused = quantize(teacher, tmp_path / "out", "--bytes", "1kB").output
    possible = refused.split("need --bytes ")[1].split(",")[0]
    result = quantize(teacher, tmp_path / "out", "--bytes", possible)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("layout", candidates.LAYOUTS)
@pytest.mark.parametrize("algorithm", ["gptq", "rtn", "awq+gptq"])
def test_bytes_are_kept_and_bits_differ(teacher: Path, tmp_path: Path, algorithm: str, layout: str) -> None:
    most = {"compressed-tensors": 118_000, "epiloq": 155_000}[layout]  # Headers count, and buffers of ours are more.
    options = ("--bytes", f"{most}B", "--algorithm", algorithm, "--format", layout, "--json", tmp_path / "r.json")
    result = quantize(teacher, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0.85 * most < size == report["bytes_after"] <= most
    budget, layers = report["budget"], layers_of(tmp_path / "out")
    assert set(budget["schemes"]) == set(layers) and len(layers) == 14
    assert len(budget["counts"]) > 1
    for name, layer in layers.items():
        grid = candidates.grids([budget["schemes"][name]], False)[budget["schemes"][name]]
        assert layer.bits == grid.bits
        assert grid.length(layer.in_features) == (layer.in_features if layer.group_size == -1 else layer.group_size)
    # One engine's layer is made of those that read one input.
    for block in range(2):
        for path, names in {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}.items():
            assert len({budget["schemes"][f"model.layers.{block}.{path}.{name}"] for name in names}) == 1
    assert budget["measured"] > 0
    losses = [loss for _, loss in budget["frontier"]]
    assert losses == sorted(losses, reverse=True)
    if not report_page.missing():
        page = (tmp_path / "out" / "report.html").read_text()
        assert f"Divergence by bytes of weights; --bytes {amount.megabytes(most)} gives" in page


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_in_the_budget(tmp_path: Path, tied: bool) -> None:
    """Most bytes are theirs: what they give up, the layers have, and the files stay within the bytes."""
    config = tiny_model(**ROUND).config
    config.tie_word_embeddings = tied
    model = transformers.LlamaForCausalLM(config).eval()
    sharpen(model)
    save(tmp_path / "model", model)
    (tmp_path / "text.txt").write_text(letters(1500))
    auto = ("--head", "auto", "--embedding", "auto")
    refused = quantize(tmp_path / "model", tmp_path / "float", "--bytes", "1kB", "--format", "epiloq").output
    least = amount.parse_bytes(refused.split("need --bytes ")[1].split(",")[0])
    warned = quantize(tmp_path / "model", tmp_path / "float", "--bytes", f"{int(1.05 * least)}B", "--format", "epiloq")
    assert warned.exit_code == 0
    assert "--head auto --embedding auto choose schemes for them" in " ".join(warned.output.split())
    refused = quantize(tmp_path / "model", tmp_path / "vast", "--bytes", "2MB", *auto).output
    enough = amount.parse_bytes(" ".join(refused.split()).split(" to --bytes ")[1].split()[0])
    sizes = {}
    # In floating point they alone would not leave the layers enough.
    for name, most in (("small", int(0.95 * least)), ("large", enough)):
        result = quantize(tmp_path / "model", tmp_path / name, "--bytes", f"{most}B", *auto, "--json", tmp_path / "r")
        assert result.exit_code == 0, result.output
        report = json.loads((tmp_path / "r").read_text())
        budget, sizes[name] = report["budget"], (tmp_path / name / "model.safetensors").stat().st_size
        assert sizes[name] == report["bytes_after"] <= most
        assert budget["bytes"] >= sizes[name] >= 0.9 * budget["bytes"]
        loaded, _ = models.load(Checkpoint(tmp_path / name))
        kinds = {role: type(loaded.get_submodule(layer)) for role, layer in ENDS.items()}
        quantised = {role: kind not in (nn.Linear, nn.Embedding) for role, kind in kinds.items()}
        assert quantised == {role: scheme != "float" for role, scheme in budget["vocabulary"].items()}
        if tied:
            assert budget["vocabulary"]["head"] == budget["vocabulary"]["embedding"]
        if name == "large":
            assert set(budget["vocabulary"].values()) == {"float"}
        else:
            assert set(budget["vocabulary"].values()) - {"float"}


ENDS = {"head": "lm_head", "embedding": "model.embed_tokens"}


@pytest.mark.parametrize("budget", [("--bits", 5), ("--scheme", "w4a16-g32")])
@pytest.mark.parametrize("option", ["--head", "--embedding"])
def test_embedding_and_head_are_chosen_only_with_a_byte_budget(
    teacher: Path, tmp_path: Path, option: str, budget: tuple[object, ...]
) -> None:
    result = quantize(teacher, tmp_path / "out", *budget, option, "auto")
    assert result.exit_code == 2
    assert f"{option} auto: expected --bytes as well" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_choice(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--bits", 5.2)
    assert quantize(teacher, tmp_path / "whole", *options).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "save", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
        assert quantize(teacher, tmp_path / "out", *options).exit_code != 0
    other = quantize(teacher, tmp_path / "out", "--bits", 5.5)
    assert other.exit_code == 2 and "budget" in other.output
    with monkeypatch.context() as patch:
        patch.setattr(search, "losses", lambda *args, **options: pytest.fail("measured again"))
        assert quantize(teacher, tmp_path / "out", *options).exit_code == 0
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_transformers_reads_it(teacher: Path, tmp_path: Path) -> None:
    """The package's own reader. It knows several groups, but none with packed zero points (as of 0.20)."""
    pytest.importorskip("compressed_tensors")
    result = quantize(teacher, tmp_path / "out", "--bits", 5.2, "--symmetric")
    assert result.exit_code == 0, result.output
    message = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(message["config_groups"]) > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = logits(models.load(Checkpoint(tmp_path / "out"))[0])
    assert float((logits(theirs) - expected).norm() / expected.norm()) < 1e-5


def test_the_package_reads_zero_points_too(teacher: Path, tmp_path: Path) -> None:
    """Each layer by the scheme that the package itself finds for its name, decompressed by the package."""
    config = pytest.importorskip("compressed_tensors.quantization")
    match = pytest.importorskip("compressed_tensors.utils.match")
    base = pytest.importorskip("compressed_tensors.compressors")
    result = quantize(teacher, tmp_path / "out", "--bits", 5.2)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    message = config.QuantizationConfig.model_validate({k: v for k, v in found.items() if k != "dequantize"})
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    float_model = models.load_float(Checkpoint(teacher))
    for name, layer in layers_of(tmp_path / "out").items():
        schemes = [(target, scheme) for scheme in message.config_groups.values() for target in scheme.targets]
        module = float_model.get_submodule(name)
        named = [scheme for target, scheme in schemes if target == name]
        by_class = [scheme for target, scheme in schemes if match.is_match(name, module, target)]
        scheme = (named or by_class)[0]
        parts = {key.rpartition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{name}.")}
        compressor = base.BaseCompressor.get_value_from_registry(scheme.format)
        theirs: Tensor = compressor.decompress(parts, scheme)["weight"]
        torch.testing.assert_close(theirs.float(), layer.weight.dequantize(), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "vast"), [("--bytes", "1GB"), ("--bits", 99)])
def test_more_than_the_largest_candidates(teacher: Path, tmp_path: Path, option: str, vast: object) -> None:
    """As much as the model in floating point takes is a mistake; a little more than needed gives the largest."""
    refused = quantize(teacher, tmp_path / "none", option, vast)
    message = " ".join(refused.output.split())
    found = re.search(
        rf"expected less than the size of .*: {option} ([\d.]+)(MB)? to {option} ([\d.]+)(MB)? for", message
    )
    assert refused.exit_code == 2 and found is not None and not (tmp_path / "none").exists(), message
    least, unit, most = float(found[1]), found[2] or "", float(found[3])
    assert 0 < least < most
    for asked, has in ((least, "w4a16"), (most, "w8a16"), (most * 1.1, "w8a16")):
        result = quantize(teacher, tmp_path / str(asked), option, f"{asked:g}{unit}", "--json", tmp_path / "r.json")
        assert result.exit_code == 0, result.output
        assert asked <= most or "is more than the largest candidates need" in " ".join(result.output.split())
        assert max(json.loads((tmp_path / "r.json").read_text())["budget"]["counts"]) in (has, f"{has}-g32")


def test_layers_of_odd_sizes_get_a_supported_scheme(tmp_path: Path) -> None:
    """36 and 100 channels are whole groups of no candidate but per channel."""
    save(tmp_path / "model", tiny_model())
    (tmp_path / "text").write_text(letters(1500))
    short = ("--windows", 8, "--length", 32, "--calibration", tmp_path / "text")
    result = run(
        "quantize", tmp_path / "model", "--bits", 6, "--output", tmp_path / "out", *short, "--json", tmp_path / "r"
    )
    assert result.exit_code == 0, result.output
    assert set(json.loads((tmp_path / "r").read_text())["budget"]["counts"]) <= {"w4a16", "w8a16"}
