"""Which layers of a model go on which workers: profiles, cost models, the best partition."""
