"""Other libraries' names and signatures over epiloq's operations, one module a library."""

from epiloq.compat import sglang, vllm

__all__ = ["sglang", "vllm"]
