"""Comparison of results, of weights, and of checkpoints in a row."""
