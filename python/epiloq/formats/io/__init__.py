"""Files and directories of tensors, and models of transformers from and to them."""
