"""Whole language models: prefill, decode and memory (``epiloq bench --model``)."""
