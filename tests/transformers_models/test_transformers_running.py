"""Models that transformers opened on epiloq's layers, at work: decoding, compiled steps, types, devices, a real one."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from epiloq.demo import teacher
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layer_reader import reader
from epiloq.formats.readers import parse
from epiloq.integrations.hf_quantizer.layers import tensors_of
from epiloq.integrations.transformers import EpiloqConfig
from epiloq.models.cache_argument import cache_argument
from opened_models import TOKENS, layers, logits, opened

# Other tests want transformers as it is.
integration.unregister()
pytestmark = pytest.mark.usefixtures("epiloq_in_transformers")


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["gptq", "int-quantized"])
def test_generate_and_a_compiled_step(seed: int, tmp_path: Path, tool: str) -> None:
    """Greedy tokens of ``generate``, of one graph without breaks over a static cache, and of the model's own loop."""
    foreign.write(tmp_path / "out", foreign.llama(), tool)
    model = opened(tmp_path / "out")
    prompt, count = TOKENS[:1, :5], 6
    expected = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    static = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    assert torch.equal(model.generate(prompt, pad_token_id=0, **static), expected)

    held = {cache_argument(model): transformers.StaticCache(config=model.config, max_cache_len=16)}
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    tokens, given, position = prompt, prompt, 0
    with torch.no_grad():
        for _ in range(count):
            where = torch.arange(position, position + given.shape[1])
            call = model.forward if position == 0 else step
            scores = call(given, **held, position_ids=where[None], use_cache=True).logits
            position += given.shape[1]
            given = scores[:, -1:].argmax(-1)
            tokens = torch.cat((tokens, given), 1)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {"": torch.device("cpu")}])
def test_device_maps(seed: int, tmp_path: Path, device_map: Any) -> None:
    pytest.importorskip("accelerate")
    foreign.write(tmp_path / "out", foreign.llama(), "awq")
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("auto takes the GPU")
    assert torch.equal(logits(opened(tmp_path / "out", device_map=device_map)), logits(opened(tmp_path / "out")))


@pytest.mark.parametrize(("tool", "dtype"), list(zip(foreign.TOOLS, cycle([torch.bfloat16, torch.float16]))))
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
    folder = Path(__file__).parents[2] / "build" / "demo" / "teacher"
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


@pytest.mark.parametrize(
    ("tool", "without"), [*((tool, "bias") for tool in foreign.TOOLS), ("static int-quantized", "input_zero_point")]
)
def test_tensors_stay_on_the_layers_device(seed: int, tool: str, without: str) -> None:
    """Opened and saved again while absent biases and zero points are created on another device by default."""
    pack, config = foreign.TOOLS[tool]
    linear = torch.nn.Linear(64, 96, bias=False)
    given = {name: tensor for name, tensor in pack(linear)[0].items() if name != without}
    described = parse(config)(["layer"], torch.nn.Linear)
    assert described is not None
    read = reader(described)
    with torch.device("meta"):
        message = tensors_of(read.opened(linear, given), read, torch.float32)
    assert given.keys() <= message.keys()
    assert all(torch.equal(message[name], tensor) for name, tensor in given.items())
    assert {tensor.device.type for tensor in message.values()} == {"cpu"}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float().cpu() - expected.float().cpu()).norm() / expected.float().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("tool", foreign.TOOLS)
def test_on_a_gpu(seed: int, tmp_path: Path, tool: str) -> None:
    """Against the CPU; activations in 8 bits may round another way where float16 sums differ."""
    bound = 0.1 if any(kind in tool for kind in ("int", "float", "fp8")) else 0.02
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
