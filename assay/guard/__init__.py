"""Guards: checks that return verdicts. `proof` is the fresh process that earns a hallmark."""
