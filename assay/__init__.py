"""Assay trains, post-trains, distils, edits and evaluates language models, and proves every artifact it hands over."""

__version__ = "0.1.0"
