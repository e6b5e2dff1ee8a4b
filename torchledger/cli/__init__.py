"""The command line: one file a command, and a line in `commands.py`."""
