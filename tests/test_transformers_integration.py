"""transformers on epiloq's layers: directories of epiloq and of other tools, saved, compiled, quantised on loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

import epiloq
import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from epiloq.demo import teacher
from epiloq.formats import deepseek_fp8, epiloq_modules
from epiloq.formats import model as models
from epiloq.formats.checkpoint import Checkpoint
from epiloq.integrations.transformers import EpiloqConfig
from epiloq.nn import Fp8BlockLinear, Int8Linear, WeightOnlyLinear
from epiloq.quantize import job as jobs
from epiloq.schemes import QuantisedLinear

# Other tests want transformers as it is.
integration.unregister()
TOKENS = torch.arange(24).view(2, 12) * 7 + 1  # Without 0, which pads.


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def opened(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def dequantised(layer: Any) -> torch.Tensor:
    if isinstance(layer, WeightOnlyLinear):
        return layer.weight.dequantize()
    state = layer.state_dict()
    if isinstance(layer, Int8Linear):
        return state["weight"] * state["weight_scale"][:, None]  # type: ignore[no-any-return]
    blocks = state["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return state["weight"].float() * blocks[: layer.out_features, : layer.in_features]  # type: ignore[no-any-return]


def quantised(folder: Path, scheme: str, layout: str, model: str = "llama", symmetric: bool = False) -> Path:
    """A directory of ``epiloq quantize``, rounded to nearest."""
    foreign.MODELS[model]().save_pretrained(folder / "float")
    settings = jobs.Settings(folder / "float", folder / "out", scheme, "rtn", layout, symmetric=symmetric)
    jobs.perform(jobs.prepare(settings))
    return folder / "out"


@pytest.mark.parametrize(
    ("scheme", "layout", "model", "symmetric"),
    [
        ("w4a16-g32", "compressed-tensors", "qwen2", False),
        ("w4a16-g32", "gptq", "gpt_neox", False),
        ("w4a16-g32", "gptq", "opt", True),
        ("w4a16-g32", "awq", "llama", False),
        ("w8a16", "compressed-tensors", "gpt_neox", True),
        ("w8a8-int8", "compressed-tensors", "opt", True),
        ("w8a8-int8-azp", "compressed-tensors", "qwen2", True),
        ("w4a16-g64", "epiloq", "qwen2", False),
        ("w8a8-int8", "epiloq", "gpt_neox", True),
    ],
)
def test_own_directories(seed: int, tmp_path: Path, scheme: str, layout: str, model: str, symmetric: bool) -> None:
    """The bits of ``epiloq eval``, before and after ``save_pretrained``, in the format that it was."""
    folder = quantised(tmp_path, scheme, layout, model, symmetric)
    found = opened(folder)
    exact, _ = models.load(Checkpoint(folder))
    assert torch.equal(logits(found), logits(exact)) and not found.training
    assert len(layers(found)) == len(layers(exact)) > 0
    assert isinstance(found.get_output_embeddings(), torch.nn.Linear)
    found.save_pretrained(tmp_path / "again", max_shard_size="40KB")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(found))
    before, after = Checkpoint(folder), Checkpoint(tmp_path / "again")
    assert after.quantization == before.quantization and len(set(after.files.values())) > 2
    tensors = dict(after.tensors())
    assert tensors.keys() == before.files.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_blocks(seed: int, tmp_path: Path, dtype: torch.dtype) -> None:
    foreign.llama().to(dtype).save_pretrained(tmp_path / "float")
    model = epiloq.quantize_(opened(tmp_path / "float"), "fp8-block")
    with pytest.warns(UserWarning, match="de-quantises"):
        deepseek_fp8.save(model, tmp_path / "out")
    found = opened(tmp_path / "out")
    assert found.dtype == dtype and torch.equal(logits(found), logits(model))
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(model))


@pytest.mark.parametrize(
    ("tool", "model"),
    [
        ("gptq", "llama"),
        ("gptq", "opt"),
        ("gptq in activation order", "gpt_neox"),
        ("gptq in activation order", "qwen2"),
        ("awq", "qwen2"),
        ("awq", "llama"),
        ("pack-quantized", "opt"),
        ("pack-quantized", "qwen2"),
        ("int-quantized", "gpt_neox"),
        ("static int-quantized", "llama"),
        ("fp8", "llama"),
        ("fp8", "opt"),
    ],
)
def test_directories_of_other_tools(seed: int, tmp_path: Path, tool: str, model: str) -> None:
    exact = foreign.write(tmp_path / "out", foreign.MODELS[model](), tool)
    found = opened(tmp_path / "out")
    kinds = {"int-quantized": Int8Linear, "static int-quantized": Int8Linear, "fp8": Fp8BlockLinear}
    assert {type(layer) for layer in layers(found).values()} == {kinds.get(tool, WeightOnlyLinear)}
    for name, layer in layers(found).items():
        assert torch.equal(dequantised(layer), exact.get_parameter(f"{name}.weight")), name
    # Activations in 8 bits err, those of a scale that nobody measured without bounds; weights alone do not.
    error = (logits(found) - logits(exact)).norm() / logits(exact).norm()
    assert error < {"int-quantized": 0.05, "fp8": 0.15, "static int-quantized": torch.inf}.get(tool, 1e-5)
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(found))


def test_packed_by_its_own_package(seed: int, tmp_path: Path) -> None:
    """The packer of the package compressed-tensors, in place of the one in this test's helper."""
    package = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    q = torch.randint(-8, 8, (64, 96), dtype=torch.int8)
    assert torch.equal(package.pack_to_int32(q, 4), foreign.words((q + 8).numpy()))


@pytest.mark.parametrize("tool", ["gptq", "int-quantized"])
def test_generate_and_a_compiled_step(seed: int, tmp_path: Path, tool: str) -> None:
    """Greedy tokens of ``generate``, of one graph without breaks over a static cache, and of the model's own loop."""
    foreign.write(tmp_path / "out", foreign.llama(), tool)
    model = opened(tmp_path / "out")
    prompt, count = TOKENS[:1, :5], 6
    expected = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    static = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    assert torch.equal(model.generate(prompt, pad_token_id=0, **static), expected)

    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    tokens, given, position = prompt, prompt, 0
    with torch.no_grad():
        for _ in range(count):
            where = torch.arange(position, position + given.shape[1])
            call = model.forward if position == 0 else step
            scores = call(given, past_key_values=cache, position_ids=where[None], use_cache=True).logits
            position += given.shape[1]
            given = scores[:, -1:].argmax(-1)
            tokens = torch.cat((tokens, given), 1)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("scheme", ["w8a8-int8-azp", "w4a8-block", "fp8-token", "fp8-block", "w4a16-g64"])
def test_quantised_after_loading(seed: int, tmp_path: Path, scheme: str) -> None:
    """As `quantize_` does it, and saved in epiloq's own format."""
    foreign.qwen2().save_pretrained(tmp_path / "float")
    found = opened(tmp_path / "float", quantization_config=EpiloqConfig(scheme))
    assert torch.equal(logits(found), logits(epiloq.quantize_(opened(tmp_path / "float"), scheme)))
    assert len(layers(found)) == 14 and found.is_quantized
    found.save_pretrained(tmp_path / "out")
    assert Checkpoint(tmp_path / "out").quantization == found.config.quantization_config.to_dict()
    again = opened(tmp_path / "out")
    assert torch.equal(logits(again), logits(found))
    assert {name: repr(layer) for name, layer in layers(again).items()} == {
        n: repr(m) for n, m in layers(found).items()
    }
    read, _ = models.load(Checkpoint(tmp_path / "out"))
    assert torch.equal(logits(read), logits(found))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_layers_to_leave(seed: int, tmp_path: Path) -> None:
    foreign.gpt_neox().save_pretrained(tmp_path / "float")
    left = ["gpt_neox.layers.1", "gpt_neox.layers.0.attention.dense"]
    found = opened(tmp_path / "float", quantization_config=EpiloqConfig("w8a16", modules_to_not_convert=left))
    assert sorted(layers(found)) == [
        f"gpt_neox.layers.0.{name}" for name in ("attention.query_key_value", "mlp.dense_4h_to_h", "mlp.dense_h_to_4h")
    ]
    found.save_pretrained(tmp_path / "out")
    again = opened(tmp_path / "out", quantization_config=EpiloqConfig())
    assert layers(again).keys() == layers(found).keys() and torch.equal(logits(again), logits(found))


def test_a_static_scheme_comes_back(seed: int, tmp_path: Path) -> None:
    model = epiloq.quantize_(foreign.llama(), "w8a8-int8-static", calibrate=logits)
    epiloq_modules.write(model, model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, tmp_path / "out")
    found = opened(tmp_path / "out")
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(found), logits(model)) and torch.equal(logits(opened(tmp_path / "again")), logits(model))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {"": torch.device("cpu")}])
def test_device_maps(seed: int, tmp_path: Path, device_map: Any) -> None:
    pytest.importorskip("accelerate")
    foreign.write(tmp_path / "out", foreign.llama(), "awq")
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("auto takes the GPU")
    assert torch.equal(logits(opened(tmp_path / "out", device_map=device_map)), logits(opened(tmp_path / "out")))


@pytest.mark.parametrize(("tool", "dtype"), list(zip(foreign.TOOLS, 4 * [torch.bfloat16, torch.float16], strict=False)))
def test_another_type_of_activations(seed: int, tmp_path: Path, tool: str, dtype: torch.dtype) -> None:
    """The quantised values stay as they are, whatever type the rest has."""
    foreign.write(tmp_path / "out", foreign.opt(), tool)
    found, exact = opened(tmp_path / "out", dtype=dtype), opened(tmp_path / "out")
    assert found.dtype == dtype == logits(found).dtype and exact.dtype == torch.float32
    for name, layer in layers(found).items():
        other = exact.get_submodule(name)
        assert layer.bias is not None and layer.bias.dtype == dtype
        for key, value in layer.state_dict().items():
            assert key == "bias" or torch.equal(value, other.state_dict()[key]), (name, key)
    found.save_pretrained(tmp_path / "again")
    again = opened(tmp_path / "again")
    assert again.dtype == dtype and torch.equal(logits(again), logits(found))


def test_a_real_model(tmp_path: Path) -> None:
    """SmolLM2, quantised after loading: it knows the capital of France, and saved it is what ``epiloq eval`` runs."""
    folder = Path(__file__).parents[1] / "build" / "demo" / "teacher"
    if not teacher.is_model(folder):
        pytest.skip("`make demo` has not left its model here")
    model = opened(folder, quantization_config=EpiloqConfig("w8a8-int8"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
    model.save_pretrained(tmp_path / "out")
    read, _ = models.load(Checkpoint(tmp_path / "out"))
    assert torch.equal(logits(opened(tmp_path / "out")), logits(model))
    assert torch.equal(logits(read), logits(model)) and len(layers(model)) == 210


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float().cpu() - expected.float().cpu()).norm() / expected.float().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("tool", foreign.TOOLS)
def test_on_a_gpu(seed: int, tmp_path: Path, tool: str) -> None:
    """Against the CPU; activations in 8 bits may round another way where float16 sums differ."""
    bound = 0.1 if "int" in tool or tool == "fp8" else 0.02
    foreign.write(tmp_path / "out", foreign.llama(), tool)
    exact = logits(opened(tmp_path / "out", dtype=torch.float16))
    found = opened(tmp_path / "out", dtype=torch.float16, device_map="cuda")
    assert all(tensor.is_cuda for tensor in found.state_dict().values())
    with torch.no_grad():
        scores = found(TOKENS.cuda()).logits
        assert distance(scores, exact) < bound
        moved = opened(tmp_path / "out", dtype=torch.float16).cuda()
        assert torch.equal(moved(TOKENS.cuda()).logits, scores)
        found.save_pretrained(tmp_path / "again")
        assert torch.equal(opened(tmp_path / "again", device_map="cuda")(TOKENS.cuda()).logits, scores)
        # transformers compiles the steps of a static cache; every step against the whole sequence at once.
        made = found.generate(
            TOKENS[:1].cuda(),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            output_scores=True,
            return_dict_in_generate=True,
        )
        whole = found(made.sequences).logits[0, -7:-1]
    assert distance(torch.cat(made.scores), whole) < bound


@pytest.mark.gpu
def test_on_two_gpus(seed: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    foreign.write(tmp_path / "out", foreign.llama(), "gptq")
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0")
    device_map = {**dict.fromkeys(names, 0), "model.layers.1": 1, "model.norm": 1, "lm_head": 0}
    found = opened(tmp_path / "out", dtype=torch.float16, device_map=device_map)
    placed = [layer.weight_q.device.index for layer in layers(found).values()]
    assert placed == 7 * [0] + 7 * [1]
    exact = opened(tmp_path / "out", dtype=torch.float16, device_map="cuda")
    with torch.no_grad():
        assert torch.equal(found(TOKENS.cuda()).logits.cpu(), exact(TOKENS.cuda()).logits.cpu())


def test_registering_can_be_taken_back() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    integration.unregister()
    assert AUTO_QUANTIZER_MAPPING["gptq"].__name__ == "GptqHfQuantizer" and "epiloq" not in AUTO_QUANTIZER_MAPPING
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["awq"].__name__ == "AwqConfig"
    integration.register()
    assert {AUTO_QUANTIZER_MAPPING[method] for method in integration.METHODS} == {integration.EpiloqQuantizer}
    assert {AUTO_QUANTIZATION_CONFIG_MAPPING[method] for method in integration.METHODS} == {EpiloqConfig}
