"""Witness: training steps and examples of an evaluation recomputed from options and files alone, by code that shares none of theirs."""
