"""What can go wrong, on demand: each fault with the check that must catch it."""
