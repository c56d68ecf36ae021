"""Checkpoint formats that other engines read too: layouts of one layer's tensors, and directories of them.

Layouts (`compressed_tensors`, `gptq`, `awq`) are pure functions between a `QuantizedWeight` and tensors by name;
`deepseek_fp8` writes and reads whole models; `checkpoint` holds files. Nothing here is imported by ``import epiloq``.
"""
