"""Checkpoints that are made while a run goes on, and fingerprints of states."""
