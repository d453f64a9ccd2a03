"""The stages of a worker: weight versions, optimizer, the work on a micro-batch, and the loop."""
