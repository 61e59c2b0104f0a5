"""One page per method."""
