"""Transports move messages into inboxes: within one process, or over links between processes."""
