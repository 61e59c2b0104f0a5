"""Verbs of the command line, one module each: its flags, its examples and its `run`."""
