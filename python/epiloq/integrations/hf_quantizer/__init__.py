"""The quantizer of transformers that opens and saves models on epiloq's layers; importing it registers nothing."""
