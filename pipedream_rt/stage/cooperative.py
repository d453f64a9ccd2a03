"""Hosts of stages that share a thread: each runs until it needs a message that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from pipedream_rt.errors import PipelineClosed
from pipedream_rt.lifecycle import is_of_a_handler, name_this_thread
from pipedream_rt.messages.inbox import Steps, Waiter, Wanted
from pipedream_rt.stage.host import StageHost


class Turns:
    """The turns of one host on a shared thread.

    Attributes:
        wanted: The message that its stages wait for; None before the first turn.
        has_ended: Whether its stages have raised an error, or were ended.
    """

    def __init__(self, host: StageHost) -> None:
        self.host = host
        self.wanted: Wanted | None = None
        self.has_ended = False
        self._steps: Steps[None] = host.run()

    def take(self, *, once: bool = False) -> bool:
        """Run until a message is missing, or for one if `once`; return whether anything ran."""
        goes_on = self.wanted is None
        try:
            wanted = next(self._steps) if self.wanted is None else self.wanted
            while (message := self.host.inbox.take_if_there(wanted)) is not None:
                wanted, goes_on = self._steps.send(message), True
                if once:
                    break
            self.wanted = wanted
        except Exception as error:
            self.fail(error)
            goes_on = True
            if is_of_a_handler(error):
                raise  # it is meant for the caller, as is Ctrl-C
        except BaseException:  # as Ctrl-C
            self.has_ended = True
            raise
        return goes_on

    def fail(self, error: BaseException) -> None:
        """Tell the coordinator of an error, unless the stages were told to end."""
        self.has_ended = True
        if not (isinstance(error, PipelineClosed) or is_of_a_handler(error)):
            self.host.report(error)

    def end(self) -> None:
        self.has_ended = True
        self._steps.close()
        self.host.end()


def serve_together(hosts: Sequence[StageHost], threads: int, waiter: Waiter) -> None:
    """Run the stages of several hosts on this thread until their inboxes are closed."""
    # The order of turns changes no bits: an inbox hands out the message that is asked for, and no
    # other. An error of one host is reported; the others go on until they are ended.
    if len(hosts) == 1:
        hosts[0].serve()
        return
    name_this_thread(hosts[0].plain_name)
    torch.set_num_threads(threads)
    every = [Turns(host) for host in hosts]
    with ExitStack() as ending:
        for each in every:
            each.host.inbox.watch()
            ending.callback(each.end)
        while open_ones := [each for each in every if not each.has_ended]:
            if not any(map(_take, open_ones)):
                _wait_for_one(open_ones, waiter)


def _take(each: Turns) -> bool:
    """Give a host its turn. At the top of a thread all errors become messages."""
    try:
        return each.take()
    except BaseException as error:
        each.fail(error)
        return True


def _wait_for_one(every: Sequence[Turns], waiter: Waiter) -> None:
    """Wait until a message comes that a host wants; a host that has waited too long fails."""
    shortest: float | None = None
    for each in every:
        assert each.wanted is not None
        deadline = each.wanted.deadline
        if deadline.expired():
            each.fail(each.host.inbox.late(deadline))
            return
        left = deadline.remaining_s()
        if left is not None:
            shortest = left if shortest is None else min(left, shortest)
    waiter.wait(shortest)
