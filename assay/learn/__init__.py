"""The training loop, the objectives, the optimizers and learning-rate schedules."""
