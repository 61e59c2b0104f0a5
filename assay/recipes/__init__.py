"""Recipes, one page per method."""
