"""Reading and writing of model directories as transformers models."""
