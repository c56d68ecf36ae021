"""Other libraries' names and signatures over epiloq's operations, one module a library."""

from epiloq.compat import deep_gemm, sglang, vllm

__all__ = ["deep_gemm", "sglang", "vllm"]
