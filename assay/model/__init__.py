"""The decoder, its KV cache, LoRA and patches, tokenizers and chat templates, and foreign names and layouts."""
