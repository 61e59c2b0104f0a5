"""Agents: environments of several turns in worker processes, tool calls in each model's own format, and the trajectories they leave."""
