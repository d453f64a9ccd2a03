"""The views of a run: its events, its trace, its description, and hints for its user."""
