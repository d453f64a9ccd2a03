"""Transports, which move messages into inboxes: two implementations of one interface."""
