"""Descriptions of model directories and GGUF files for ``epiloq inspect``."""
