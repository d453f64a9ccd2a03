"""How long a test waits for what must come."""

LATEST_S = 240.0
"""Seconds after which something counts as not coming at all: it says nothing about speed. Beside
eight busy processes on two cores the slowest of it takes a fifth of that."""
