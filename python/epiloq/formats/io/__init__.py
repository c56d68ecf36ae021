"""Reading and writing of model directories, and models of transformers from and to them."""
