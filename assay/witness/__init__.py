"""Witness: one training step, or a few examples of an evaluation, made again from options and files alone, by code that shares nothing with what it watches."""
