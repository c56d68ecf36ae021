"""How good a model is: text, windows of tokens, perplexity."""
