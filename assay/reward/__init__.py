"""Rewards: rule rewards in worker processes, an LLM judge, generated code in a sandbox."""
