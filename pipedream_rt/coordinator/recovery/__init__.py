"""Recovery: the workers of a run, one generation after another, what goes on after a failure, and how."""
