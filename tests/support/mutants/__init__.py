"""Seeded faults: one line of the library is changed at a time, and the tests must notice it."""
