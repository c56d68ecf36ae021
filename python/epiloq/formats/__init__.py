"""Checkpoint formats: layouts of one layer's tensors, and directories of them, read, written, converted and compared.

Layouts (`compressed_tensors`, `gptq`, `awq`) are pure functions between a `QuantizedWeight` and tensors by name;
`epiloq_modules` and `deepseek_fp8` write models in memory; `table` has every format as data; `layers` reads the layers
of a directory in any of them; `checkpoint` and `safetensors_file` hold files. Nothing here is imported by
``import epiloq``.
"""
