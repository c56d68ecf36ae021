"""Layers and models over two and three processes, by gloo on a CPU: the results of one process, and its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_shards import MADE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from epiloq.nn import ExpertLinears, GatedExperts, Int8Linear, WeightOnlyLinear
from epiloq.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import epiloq
import epiloq.integrations.transformers as integration
import foreign_checkpoints as foreign
from engine_schemes import FEW_BITS, converted
from epiloq.formats import epiloq_modules
from gloo_ranks import Ranks
from opened_models import logits

integration.unregister()
pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)
K, N = 90, 58
SEQUENCE = 12
QUANTISED_FIRST = (
    *("int8", "int8-azp", "int8-static", "fp8-static", "fp8-limit", "w4a8-fp8", "w4a8-int8"),
    *("w4a8-mxfp4-fp8", "w4a8-nvfp4-int8"),
)
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 96}
# Models by the names of their directories: family, scheme, and schemes of the output head and the embedding. Names
# with "w4" are those of models that do not round activations.
MODELS: dict[str, tuple[str, str, str | None, str | None]] = {
    "int8": ("Llama", "w8a8-int8", None, None),
    "fp8": ("Qwen2", "fp8", None, None),
    "blocks": ("Qwen2", "w4a8-block-g32", None, None),
    "blocks-of-128": ("Llama", "w4a8-block", "w8a8-int8", None),
    "w4": ("Llama", "w4a16-g32", None, None),
    "w4-mxfp4": ("Qwen2", "w4a16-mxfp4", "w4a16-nvfp4", None),
    "w4-nvfp4": ("Llama", "w4a16-nvfp4", None, "w8a16"),
    "w4-and-fp8": ("Llama", "w8a16-fp8-block", "w8a16-fp8", None),
    "w4-of-2-bits": ("Llama", "w2a16-g32", None, None),
    "w4-of-3-bits": ("Qwen2", "w3a16-g64", None, None),
    "mxfp4-fp8": ("Llama", "w4a8-mxfp4-fp8", None, None),
    "nvfp4-fp8": ("Qwen2", "w4a8-nvfp4-fp8", None, None),
    "w4-tied": ("Llama", "w8a16", "w4a16-g32", "w4a16-g32"),
    "mix-int8": ("Mixtral", "w8a8-int8", None, None),
    "mix-w4": ("Mixtral", "w4a16-g32", None, None),
    "mix-w4-mxfp4": ("Mixtral", "w4a16-mxfp4", None, None),
    "mix-int4": ("Mixtral", "w4a8-int8", None, None),
}
TOOLS = (*foreign.TOOLS, foreign.FP8_BLOCKS)
# AutoAWQ's later layouts have multiples of 128 inputs, and blocks of FP8 are written of such alone.
WIDE = {"hidden_size": 384, "head_dim": 64, "intermediate_size": 256}


def made(name: str, k: int = K, n: int = N) -> Any:
    torch.manual_seed(3)
    return MADE[name](k, n)


def of_columns(name: str, mesh: Any) -> None:
    """Columns over ranks, as they are, gathered, and with gradients of the input."""
    layer, x = made(name), torch.randn(SEQUENCE, K)
    wanted = layer(x)
    for layout in (Shard(-1), Replicate()):
        cut = parallelize_module(made(name), mesh, ColwiseParallel(output_layouts=layout))
        y = cut(x)
        mine = wanted if layout == Replicate() else wanted[:, cut.shard.rows.start : cut.shard.rows.stop]
        if "int8" in name:
            assert torch.equal(y, mine), name
        torch.testing.assert_close(y, mine, rtol=1e-5, atol=1e-4)
    given, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    cut(given).square().sum().backward()
    layer(other).square().sum().backward()
    torch.testing.assert_close(given.grad, other.grad, rtol=1e-4, atol=1e-3)


def of_rows(name: str, mesh: Any) -> None:
    """The sum is one process's but for how activations are rounded, and the same on every rank."""
    layer, x = made(name), torch.randn(SEQUENCE, K)
    wanted = layer(x)
    for layout in (Shard(-1), Replicate()):
        cut = parallelize_module(made(name), mesh, RowwiseParallel(input_layouts=layout))
        own = cut.shard.columns
        y = cut(x if layout == Replicate() else x[:, own.start : own.stop])
        others = [torch.empty_like(y) for _ in range(mesh.size())]
        dist.all_gather(others, y)
        assert all(torch.equal(y, other) for other in others), name
        static = "static" in name
        exact = name in ("table-4", "fp8-weight-only") or name.startswith(("w3a16", "w4a16", "w8a16")) or static
        # Rounding of activations to 4 bits of mantissa is the largest; static scales are the same ones.
        bound = 1e-5 if exact else 0.07
        reach = x.abs() @ layer.dequantized_weight().abs().t() + layer.bias.abs()
        assert ((y - wanted).abs() <= bound * reach + 1e-5).all(), (name, ((y - wanted).abs() / reach).max())
    if "fp8-limit" not in name:
        given, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        (cut(given) * wanted).sum().backward()
        (layer(other) * wanted).sum().backward()
        torch.testing.assert_close(
            given.grad[:, own.start : own.stop], other.grad[:, own.start : own.stop], rtol=1e-4, atol=1e-3
        )
    scattered = parallelize_module(made(name), mesh, RowwiseParallel(output_layouts=Shard(0)))
    rows = scattered(x[:, own.start : own.stop])
    length = -(-SEQUENCE // mesh.size())
    torch.testing.assert_close(rows, y[mesh.get_local_rank() * length :][:length], rtol=1e-5, atol=1e-4)


def quantised_first(name: str, mesh: Any) -> None:
    """Bytes that travel give the bits of tokens that travel."""
    for dim, shape in ((0, (SEQUENCE, K)), (1, (2, SEQUENCE, K))):
        x, layer = torch.randn(shape).to(torch.bfloat16), made(name).to(torch.bfloat16)
        cut = made(name).to(torch.bfloat16)
        parallelize_module(cut, mesh, ColwiseParallel(input_layouts=Shard(dim), quantise_first=True))
        own = x.chunk(mesh.size(), dim)[mesh.get_local_rank()]
        rows = cut.shard.rows
        assert torch.equal(cut(own), layer(x)[..., rows.start : rows.stop]), name


def of_experts(name: str, mesh: Any) -> None:
    torch.manual_seed(5)
    linear = [[nn.Linear(*size, bias=False) for size in ((32, 48), (32, 48), (48, 32))] for _ in range(5)]
    kind = {"int8": Int8Linear, "w4": WeightOnlyLinear}[name]
    names = ("gate_proj", "up_proj", "down_proj")
    each = [dict(zip(names, map(kind.from_linear, three), strict=True)) for three in linear]
    whole = ExpertLinears(each, nn.SiLU())
    x, index = torch.randn(17, 32), torch.stack([torch.randperm(5)[:2] for _ in range(17)])
    weights = torch.rand(17, 2)
    run = GatedExperts.from_linears(whole) or whole
    wanted, size = run(x, index, weights), sum(p.numel() for p in run.parameters())
    cut = parallelize_module(run, mesh, ExpertParallel())
    assert sum(p.numel() for p in cut.parameters()) * 5 == size * len(cut.part)
    with torch.no_grad():
        torch.testing.assert_close(cut(x, index, weights), wanted, rtol=1e-4, atol=1e-5)
        one = torch.zeros(17, 2, dtype=torch.int64)  # Ranks without a single row.
        assert torch.isfinite(cut(x, one, weights)).all()


def of_model(folder: Path, target: Path, rank: int) -> None:
    """The logits are near those of one process, and what is saved is what one process saves."""
    expected = torch.load(folder / "logits.pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    cut = [module for module in model.modules() if getattr(module, "shard", None) is not None]
    assert cut or any(getattr(module, "part", None) for module in model.modules())
    found = logits(model)
    # Rounded activations differ by a part of a step; FP8 ones have 4 bits.
    exact = any(word in folder.name for word in ("w4", "gptq", "awq", "pack"))
    bound = 1e-4 if exact else 0.15
    assert (found - expected).norm() <= bound * expected.norm(), (folder, (found - expected).norm() / expected.norm())
    model.save_pretrained(target)
    assert torch.equal(logits(model), found)
    dist.barrier()
    if rank == 0:
        import safetensors.torch

        def tensors(where: Path) -> dict[str, torch.Tensor]:
            return {k: v for file in where.glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}

        one, other = tensors(folder.with_name(f"alone-{folder.name[6:]}")), tensors(target)
        assert one.keys() == other.keys(), (folder, one.keys() ^ other.keys())
        for key, tensor in one.items():
            assert tensor.dtype == other[key].dtype, key
            assert torch.equal(tensor.contiguous().view(torch.uint8), other[key].contiguous().view(torch.uint8)), key
        model = transformers.AutoModelForCausalLM.from_pretrained(target)
        assert torch.equal(logits(model), expected)
    dist.barrier()


def refused(folder: Path, rank: int, world: int, change: Any, expected: str) -> None:
    own = folder.parent / f"bad-{rank}-{world}"
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(folder, own)
    change(own)
    try:
        transformers.AutoModelForCausalLM.from_pretrained(own, tp_plan="auto")
    except ValueError as error:
        assert expected in str(error), error
    else:
        raise AssertionError(f"expected: {expected}")


def edit(folder: Path, values: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def vocabulary(rank: int) -> dict[str, Any]:
    return {"rms_norm_eps": 1e-6 * (rank + 1)}


def spoil(folder: Path, rank: int) -> None:
    """Change one value of one tensor, on the last rank."""
    if rank > 0:
        file = next(folder.glob("*.safetensors"))
        values = bytearray(file.read_bytes())
        values[-1] ^= 1
        file.write_bytes(values)


def on_every_rank(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for name in MADE:
        torch.manual_seed(11)
        of_columns(name, mesh)
        of_rows(name, mesh)
    for name in QUANTISED_FIRST:
        torch.manual_seed(11)
        quantised_first(name, mesh)
    for name in ("int8", "w4"):
        of_experts(name, mesh)
    integration.register()
    # Each on two ranks or on three.
    for path in sorted(folder.glob("model-*"))[world % 2 :: 2]:
        of_model(path, folder / f"{path.name[6:]}.saved{world}", rank)
    path = folder / "model-int8"
    refused(path, rank, world, lambda own: edit(own, vocabulary(rank)), "expected the same model on every rank")
    refused(path, rank, world, lambda own: spoil(own, rank), "expected the same directory on every rank")
    refused(path, rank, world, lambda own: edit(own, ONE_HEAD), "expected a number of ranks that divides")


def quantised(model: Any, scheme: str, head: str | None, embedding: str | None) -> Any:
    """A model whose layers have a scheme, or few bits, which no scheme has."""
    if scheme not in FEW_BITS:
        return epiloq.quantize_(model, scheme, head=head, embedding=embedding)
    for name, module in list(model.model.named_modules()):
        if type(module) is nn.Linear:
            model.model.set_submodule(name, converted(scheme, module))
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of tiny models, and the logits of one process."""
    folder: Path = tmp_path_factory.mktemp("models")
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 16,
        "vocab_size": 192,
        "max_position_embeddings": 64,
    }
    for name, (family, scheme, head, embedding) in MODELS.items():
        torch.manual_seed(1)
        # Sizes of vocabularies that no number of ranks divides.
        more = {"vocab_size": 197, "num_hidden_layers": 1, "tie_word_embeddings": "tied" in name}
        config = getattr(transformers, f"{family}Config")(**(sizes | (more if head or embedding else {})))
        if family == "Mixtral":
            config.num_local_experts = 5
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for module in model.modules():
            if isinstance(getattr(module, "bias", None), nn.Parameter):
                nn.init.normal_(module.bias)
        epiloq_modules.save(quantised(model, scheme, head, embedding), folder / f"model-{name}")
    for tool in TOOLS:
        torch.manual_seed(2)
        more = WIDE if "gemv" in tool or "blocks" in tool else {}
        config = transformers.LlamaConfig(**(sizes | {"num_hidden_layers": 1} | more))
        foreign.write(
            folder / f"model-by-{tool.replace(chr(32), chr(45))}", transformers.LlamaForCausalLM(config).eval(), tool
        )
    integration.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have: torch's products of dequantised weights add in another order by two
    try:
        for path in folder.glob("model-*"):
            model = transformers.AutoModelForCausalLM.from_pretrained(path)
            torch.save(logits(model), path / "logits.pt")
            model.save_pretrained(folder / f"alone-{path.name[6:]}")
    finally:
        torch.set_num_threads(threads)
        integration.unregister()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_and_three_processes(models: Path, world: int) -> None:
    Ranks(models, world, lambda rank: on_every_rank(rank, world, models)).check()
