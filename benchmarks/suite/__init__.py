"""The benchmark suite: cases that are run in turn, kept as JSON lines, and shown as tables."""
