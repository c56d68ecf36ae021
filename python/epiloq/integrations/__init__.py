"""Integrations into other libraries, one package per library. Importing one registers it; ``import epiloq`` imports
none."""
