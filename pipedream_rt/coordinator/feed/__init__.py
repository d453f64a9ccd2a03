"""Feeding: the loop over a loader, and mini-batches on their way through the pipe."""
