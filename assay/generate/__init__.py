"""Generation: the batched sampler on the trainer's own weights, and the OpenAI-compatible server."""
