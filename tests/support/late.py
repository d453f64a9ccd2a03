"""A signal whose handler raises an error, at a named step of a wait of the script's thread."""

import signal
from contextlib import contextmanager


class Late(Exception):
    """What the handler raises, without a text."""


def too_late(number, frame):
    raise Late


@contextmanager
def late_at(pipe, step, after=0):
    """Let the handler raise once when the coordinator's inbox comes to a step; yield the times.

    Args:
        pipe: The pipeline.
        step: A method of the inbox: ``"_find"`` comes before a message is taken, ``"_remove"``
            takes it, and the error comes behind that.
        after: How many times to let pass before.
    """
    inbox, struck = pipe._group.recovery.inbox, []
    original = getattr(inbox, step)
    left = [None] * after

    def struck_at(*args):
        found = original(*args)
        if left or struck:
            left[:1] = []
            return found
        struck.append(step)
        signal.raise_signal(signal.SIGUSR1)
        return found

    signal.signal(signal.SIGUSR1, too_late)
    setattr(inbox, step, struck_at)
    try:
        yield struck
    finally:
        delattr(inbox, step)
