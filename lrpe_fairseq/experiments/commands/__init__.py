"""The command-line entry points."""
