"""Checkpoints that are made while a run goes on, and what identifies a state."""
