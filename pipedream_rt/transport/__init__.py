"""Moves messages into inboxes. Two implementations behind one interface, held to one contract."""
