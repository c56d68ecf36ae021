"""epiloq inside other libraries, one package a library; importing one registers it. ``import epiloq`` imports none."""
