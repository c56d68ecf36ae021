"""transformers' quantizer for epiloq's layers; importing it registers nothing."""
