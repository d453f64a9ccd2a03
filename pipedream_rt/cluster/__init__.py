"""Where stages run: threads of this process, or worker processes; how they start, join and end."""
