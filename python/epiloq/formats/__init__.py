"""Checkpoint formats: layouts of one layer's tensors, and directories of them, read, written, converted and compared.

Layouts (`awq`, `compressed_tensors`, `gguf`, `gptq`, `marlin`) are pure functions between a `PackedWeight` (or a
calibrated `QuantizedWeight`) and tensors by name, see docs/weight_layouts.md; `gguf_model` runs a file's;
`epiloq_modules` and `deepseek_fp8` write models in memory; `table` has every format as data, `readers` the way back;
`layers` reads the layers of a directory in any of them; `checkpoint` and `safetensors_file` hold files. Nothing here is
imported by ``import epiloq``.
"""
