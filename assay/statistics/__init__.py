"""Statistics: estimates with intervals, effects with p-values, sequential bounds, early stopping, stability of seeds."""
