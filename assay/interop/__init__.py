"""Our checks and models inside other people's tools."""
