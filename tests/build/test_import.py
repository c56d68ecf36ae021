"""What `import epiloq` costs and brings along."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import epiloq

IMPORT = """
import sys, time
begin = time.process_time()
import torch
before = set(sys.modules)
start = time.process_time()
import epiloq
end = time.process_time()
heavy = {"typer", "rich", "matplotlib", "transformers", "safetensors", "torch._dynamo", "torch._inductor"}
heavy |= {"epiloq.compat", "epiloq.nn", "epiloq.quantize", "epiloq.schemes"}
assert not heavy & (set(sys.modules) - before), heavy & (set(sys.modules) - before)
print((end - start) / (start - begin))
"""


REGISTERED_BY_TORCH = """
import torch
del torch._library.simple_registry.singleton
assert not hasattr(torch._library.simple_registry, "singleton")
calls = []
torch.library.register_fake = lambda name, fake, lib: calls.append((name, fake))
import epiloq
name, fake = next(pair for pair in calls if pair[0] == "epiloq::scaled_mm")
a, b = torch.empty(3, 8, dtype=torch.int8, device="meta"), torch.empty(8, 5, dtype=torch.int8, device="meta")
one = torch.empty(1, device="meta")
print(fake(a, b, one, one, out_dtype=torch.bfloat16).shape)
"""


GRADIENTS_BY_TORCH = """
import torch
del torch._library.autograd.Info
calls = []
torch.library.register_autograd = lambda name, backward, setup_context, lib: calls.append(name)
import epiloq
print("epiloq::scaled_mm" in calls, "epiloq::scaled_mm_out" in calls)
"""


def test_modules_are_attributes() -> None:
    assert epiloq.compat.vllm.cutlass_scaled_mm and epiloq.compat.sglang.int8_scaled_mm
    assert epiloq.compat.deep_gemm.fp8_gemm_nt
    assert epiloq.schemes.available() and epiloq.nn.Int8Linear
    assert [name for name in epiloq.__all__ if not hasattr(epiloq, name)] == []
    assert set(epiloq.__all__) <= set(dir(epiloq))
    with pytest.raises(AttributeError, match="module 'epiloq' has no attribute 'quantise'"):
        epiloq.quantise  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compat", "nn", "quantize", "quantize_", "schemes"])
def test_each_module_can_be_imported_first(name: str) -> None:
    code = f"import epiloq; print(epiloq.{name}.__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip().removeprefix("epiloq.") == name


def test_import_is_light() -> None:
    """Beside torch, of the processor's time: machines differ, and may be busy. With an installation's byte code."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    best = 1.0
    for _ in range(10):
        run = subprocess.run(
            [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, env=environment
        )
        best = min(best, float(run.stdout))
        if best < 0.03:
            break
    assert best < 0.03, f"import epiloq adds {best:.1%} to what import torch takes"


@pytest.mark.slow
def test_shapes_are_registered_by_torch_where_its_registry_is_not_as_expected() -> None:
    run = subprocess.run([sys.executable, "-c", REGISTERED_BY_TORCH], capture_output=True, text=True)
    assert run.stdout.strip() == "torch.Size([3, 5])", run.stderr
    run = subprocess.run([sys.executable, "-c", GRADIENTS_BY_TORCH], capture_output=True, text=True)
    assert run.stdout.strip() == "True False", run.stderr
