"""Functions with the names and signatures of other libraries, implemented by epiloq; one module per library."""

from epiloq.compat import deep_gemm, sglang, vllm

__all__ = ["deep_gemm", "sglang", "vllm"]
