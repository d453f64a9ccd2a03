"""The worker process: its command, its start, its life in a group, and its end."""
