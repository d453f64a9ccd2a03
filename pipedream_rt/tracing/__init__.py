"""Traces of runs: spans that are recorded, kept in files, drawn, summed up and replayed."""

from pipedream_rt.tracing.replay import Replay
from pipedream_rt.tracing.summary import Summary, describe, summarize
from pipedream_rt.tracing.trace import Trace

__all__ = ["Replay", "Summary", "Trace", "describe", "summarize"]
