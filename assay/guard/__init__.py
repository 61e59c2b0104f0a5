"""Checks that return verdicts; proof.py is the fresh process that earns a hallmark."""
