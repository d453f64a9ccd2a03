"""What a run will cost: orders and costs give a trace, without running anything. Pure."""
