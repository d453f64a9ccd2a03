"""What travels between the coordinator and the stages, as values, as bytes, and while it waits."""
