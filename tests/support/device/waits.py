"""Finds every wait of the product by watching its calls, and drops one of them."""

import contextlib
import sys
import threading
from collections import Counter
from pathlib import Path

import pipedream_rt
from support.device import standin

HERE = str(Path(pipedream_rt.__file__).parent)

KINDS = {
    "synchronize": "event",
    "wait_event": "wait_event",
    "wait_stream": "wait_event",
    "record_event": "record_event",
    "record_stream": "record_stream",
    "item": "item",
    "cpu": "copy",
}
"""What each call of torch is for the stand-in. A stream that waits for another one records an event
and waits for it; one that records an event does that alone."""


@contextlib.contextmanager
def watched(dropped=None):
    """Count the calls by their places, as ``accelerator.py leave wait_stream``, in all threads.

    Args:
        dropped: The place whose waits are dropped; None to drop none.
    """
    sites = Counter()

    def look(frame, event, called):
        if event != "c_call" or getattr(called, "__name__", "") not in KINDS:
            return
        code = frame.f_code
        if not code.co_filename.startswith(HERE):
            return
        file = code.co_filename.removeprefix(HERE).lstrip("/")
        site = f"{file} {code.co_name} {called.__name__}"
        sites[site] += 1
        if site == dropped:
            standin.ignore_next(KINDS[called.__name__])

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield sites
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
