"""Witness: one training step replayed from options and files alone, by code that shares nothing with what it watches."""
