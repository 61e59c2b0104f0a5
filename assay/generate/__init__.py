"""Generation: the batched sampler on the trainer's own weights."""
