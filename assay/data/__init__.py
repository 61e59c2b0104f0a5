"""Data: text and conversations become hashed tokens with weights."""
