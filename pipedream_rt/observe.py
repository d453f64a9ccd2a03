"""The public names of `pipedream_rt.tracing`: what traces of runs are read with."""

from __future__ import annotations

from pipedream_rt.tracing import Replay, Summary, Trace, describe, summarize

__all__ = ["Replay", "Summary", "Trace", "describe", "summarize"]
