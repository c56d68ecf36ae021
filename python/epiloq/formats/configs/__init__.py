"""Parsers of other tools' quantisation configurations.

Each module's ``parse`` turns a ``quantization_config`` into rules: a function from a layer's names and class to its
`Description`, or None where the layer stays in floating point. Whatever would change the computation and is not
understood is refused, naming key and value.
"""
