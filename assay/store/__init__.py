"""Store: bytes on disk, whole or not at all."""
