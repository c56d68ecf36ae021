"""The command line: ``epiloq`` and its commands, which `app.COMMANDS` lists."""
