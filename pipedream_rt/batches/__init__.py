"""From the items of a loader to micro-batches: items are read, cut, weighed and fed."""
