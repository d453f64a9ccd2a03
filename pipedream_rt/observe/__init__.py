"""What a run did, as spans: recorded, kept in files, drawn, summed up. Pure."""

from pipedream_rt.observe.replay import Replay
from pipedream_rt.observe.summary import Summary, describe, summarize
from pipedream_rt.observe.trace import Trace

__all__ = ["Replay", "Summary", "Trace", "describe", "summarize"]
