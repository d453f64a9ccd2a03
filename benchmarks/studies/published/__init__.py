"""The planners that were published with PipeDream, to compare ours with."""
