"""The command line: ``epiloq env``, ``epiloq demo`` and ``epiloq bench``."""
