"""Hosts of stages that share a thread take turns, and an error of one does not end the others."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext as does_not_raise
from datetime import timedelta

import pytest
import torch
from support import messages
from support.deadlines import LATEST_S

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout, PipelineClosed
from pipedream_rt.messages.inbox import Inbox, Wanted
from pipedream_rt.messages.message import Reply
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.stage.cooperative import Turns, serve_together


def reply(number, to=0):
    payload = Reply(structure=[], refused="")
    return messages.message(payload, to=COORDINATOR, sender=to, number=number)


class Host:
    """In the place of a host: it takes replies 0, 1, 2 and so on, and does what it is told.

    Attributes:
        taken: The numbers of those that it has taken.
        reported: The errors that it was told to report.
    """

    def __init__(self, at=None, error=None, timeout_s=None, waiter=None):
        self.inbox = Inbox("the worker", waiter=waiter)
        self._at, self._error = at, error
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self.taken, self.reported, self.ends = [], [], 0
        self.plain_name = "host"

    def run(self):
        for number in range(100):
            message = yield Wanted(reply(number).key, Deadline(self._timeout))
            self.taken.append(message.key.number)
            if number == self._at:
                raise self._error

    def put(self, *numbers):
        for number in numbers:
            assert self.inbox.put(reply(number))
        return self

    def report(self, error):
        self.reported.append(error)

    def end(self):
        self.ends += 1


def test_a_turn_takes_all_that_is_there_and_stops_at_what_is_not():
    turns = Turns(Host().put(0, 1, 3))
    assert turns.take()
    assert turns.host.taken == [0, 1]
    assert turns.wanted.key == reply(2).key
    assert not turns.take()
    turns.host.put(2)
    assert turns.take()
    assert turns.host.taken == [0, 1, 2, 3]


def test_a_turn_may_be_for_one_message():
    turns = Turns(Host().put(0, 1))
    for expected in ([0], [0, 1]):
        assert turns.take(once=True)
        assert turns.host.taken == expected
    assert not turns.take(once=True)


def test_the_first_turn_runs_even_if_no_message_is_there():
    turns = Turns(Host())
    assert turns.take()
    assert not turns.take()


BOOM = KeyError("boom")


@pytest.mark.parametrize(
    ("error", "raised", "reported"),
    [
        (BOOM, does_not_raise(), [BOOM]),
        (PipelineClosed("the end"), does_not_raise(), []),
        (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt), []),
    ],
    ids=["an error", "a closed pipeline", "what ends the script"],
)
def test_who_is_told_what_ends_the_turns(error, raised, reported):
    turns = Turns(Host(at=0, error=error).put(0))
    with raised:
        assert turns.take()
    assert (turns.has_ended, turns.host.reported) == (True, reported)


def test_what_a_signal_handler_of_the_script_has_raised_is_raised():
    class Deadlined(Exception):
        pass

    def handler(number, frame):
        raise Deadlined

    class Alarmed(Host):
        def run(self):
            yield Wanted(reply(0).key, Deadline(None))
            signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, handler)
    turns = Turns(Alarmed().put(0))
    with pytest.raises(Deadlined):
        turns.take()
    assert (turns.has_ended, turns.host.reported) == (True, [])


class Script:
    """A waiter that lets something arrive at each wait, and closes at the end.

    Attributes:
        waits: For how long each wait was to be.
    """

    def __init__(self, *steps):
        self._steps, self.waits = list(steps), []

    def wait(self, seconds):
        self.waits.append(seconds)
        self._steps.pop(0)()

    def wake(self):
        pass


def serve(hosts, script):
    """Serve on a thread of its own, which gets the name of a host."""
    with ThreadPoolExecutor(1) as pool:
        threads = torch.get_num_threads()
        pool.submit(serve_together, hosts, threads, script).result(LATEST_S)


def closing(*hosts):
    return lambda: [host.inbox.close(PipelineClosed("the end")) for host in hosts]


@pytest.mark.threads
def test_hosts_run_until_all_inboxes_are_closed():
    one, two = Host(), Host(at=1, error=KeyError("boom"))
    script = Script(
        lambda: one.put(0) and two.put(0),
        lambda: two.put(1),
        lambda: one.put(1),
        closing(one, two),
    )
    serve([one, two], script)
    assert (one.taken, two.taken) == ([0, 1], [0, 1])
    assert one.reported == []
    assert [str(error) for error in two.reported] == ["'boom'"]
    assert (one.ends, two.ends) == (1, 1)
    assert script.waits == [None] * 4


@pytest.mark.threads
def test_a_wait_is_as_long_as_the_nearest_deadline():
    one, two = Host(timeout_s=1000), Host(timeout_s=500)
    script = Script(closing(one, two))
    serve([one, two], script)
    (seconds,) = script.waits
    assert 0 < seconds <= 500


@pytest.mark.threads
def test_who_has_waited_too_long_fails_alone():
    one, two = Host(), Host(timeout_s=0)
    script = Script(closing(one, two))
    serve([one, two], script)
    (error,) = two.reported
    assert isinstance(error, MessageTimeout)
    assert "reply 0 from stage 0" in str(error)
    assert one.reported == []
    assert len(script.waits) == 1
