"""Integrations into other libraries, one package each. Importing one registers it; ``import epiloq`` imports none."""
