"""Stages in the caller's own thread, one after another: no processes, the same bits."""
