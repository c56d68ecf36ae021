"""No kernel of `online_quant_mm` reads global memory that nothing wrote, whatever M, N and K leave over."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epiloq


def run_all(seed: int) -> None:
    """Odd sizes by every group size and width of weights, on memory that is allocated anew for each tensor."""
    torch.manual_seed(seed)
    sizes = itertools.product((1, 3, 33), (20, 100), (128, 200), (32, 64, 128), (4, 8))
    for m, n, k, group, bits in sizes:
        # Made on the CPU: a tensor that is copied to the GPU is written whole.
        blocks = -(-k // group)
        q = torch.randint(-8, 8, (n, k if bits == 8 else k // 2), dtype=torch.int8)
        parameters = (torch.rand(n, blocks) + 0.1, torch.rand(n, blocks))
        weight = epiloq.online_quant_weight(q, *parameters, group_size=group, bits=bits)
        x = torch.randn(m, k, dtype=torch.float16).cuda()
        epiloq.online_quant_mm(x, weight.to("cuda"))
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
def test_initcheck(seed: int) -> None:
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [program, "--tool", "initcheck", "--error-exitcode", "99", sys.executable, str(Path(__file__)), str(seed)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


if __name__ == "__main__":
    run_all(int(sys.argv[1]))
