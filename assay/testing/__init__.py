"""Fixtures for tests, the zoo and the demo: tiny models, artifacts and runs that are made in seconds, and fault injection."""
