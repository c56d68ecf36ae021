"""Checkpoint formats that other engines read too: layouts of one layer's tensors, and directories of them.

Layouts (`compressed_tensors`, `gptq`, `awq`) are pure functions between a `QuantizedWeight` and tensors by name;
`checkpoint` holds files. Nothing here is imported by ``import epiloq``.
"""
