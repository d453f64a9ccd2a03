"""References to what workers hold: modules, parameters and optimizers."""
