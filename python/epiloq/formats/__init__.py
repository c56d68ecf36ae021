"""Checkpoint formats that other engines read too: layouts of one layer's tensors, and directories of them.

Layouts (`awq`, `compressed_tensors`, `gguf`, `gptq`, `marlin`) are pure functions between a `PackedWeight` (or a
calibrated `QuantizedWeight`) and tensors by name, see docs/weight_layouts.md; `gguf_model` runs a file's;
`deepseek_fp8` writes and reads whole models; `checkpoint` holds files. Nothing here is imported by ``import epiloq``.
"""
