"""Sampling from the trainer's own weights."""
