"""Tracing of forward passes: hooks at every site, ways to run a model, activation statistics, the first divergence, plots."""
