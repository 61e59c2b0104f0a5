"""The one loop, the objectives and the optimizers."""
