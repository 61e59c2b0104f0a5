"""Text and conversations become hashed tokens with weights."""
