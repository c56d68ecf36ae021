"""What ``epiloq inspect`` tells of model directories and GGUF files."""
