"""The command line: ``epiloq env``, ``demo``, ``bench``, ``quantize`` and ``eval``."""
