"""Scores, estimates and verdicts about models."""
