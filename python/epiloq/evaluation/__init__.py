"""Evaluation of language models: text, windows of tokens, perplexity, divergence and tasks."""
