"""Health of generations: degenerate texts by cause, probes of a model or an endpoint, and drift after an edit."""
