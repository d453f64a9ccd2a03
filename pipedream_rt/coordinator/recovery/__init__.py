"""Recovery: the workers of a run, one generation after another."""
