"""What a run shows: its events, its trace, its description, and hints for its user."""
