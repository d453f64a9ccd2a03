"""Messages between the coordinator and the stages: their values, their bytes, and the inbox."""
