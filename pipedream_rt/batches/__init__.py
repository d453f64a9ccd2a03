"""What a loader gives becomes micro-batches: its items are read, cut, weighed and fed."""
