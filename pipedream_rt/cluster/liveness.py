"""The watch over the workers while they run: who is alive, what each does, what its clock says."""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from pipedream_rt.cluster.engines.interface import Keeper
from pipedream_rt.cluster.interface import Fail
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.members import Member, tell
from pipedream_rt.cluster.supervision import BY_HAND
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout, PeerLost, PipelineError, TransportError, WorkerLost
from pipedream_rt.tracing.clock import Reading, best

_STORY_TIMEOUT = timedelta(seconds=2)
"""For the workers to say what they wait for, when something stalls."""


class Watch:
    """Reads the control connections on a thread of its own, and reports a worker that is lost.

    Attributes:
        silent: Names of the workers that were given up because they did not answer.
        ending: Whether the workers are to end, so that the loss of one is no failure any more.
    """

    def __init__(
        self,
        members: Sequence[Member],
        local: LocalWorkers,
        fail: Fail,
        heartbeat: timedelta,
        keeper: Keeper = BY_HAND,
    ) -> None:
        self._keeper = keeper
        self.silent: set[str] = set()
        self._members = members
        self._local = local
        self._fail = fail
        self._heartbeat_s = heartbeat.total_seconds()
        self._thread: threading.Thread | None = None
        self._all_stopped = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self.ending = False

    def start(self) -> None:
        # A daemon, though `end` joins it: at exit Python joins other threads before it runs what
        # closes a pipeline that its user forgot to close.
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Read the control connections until `end` is called."""
        with selectors.DefaultSelector() as selector, ExitStack() as opened:
            selector.register(self._woken, selectors.EVENT_READ)
            forks = self._local.open_end_of_forks()
            if forks is not None:
                opened.callback(os.close, forks)
                selector.register(forks, selectors.EVENT_READ, forks)
            for member in self._members:
                selector.register(member.control, selectors.EVENT_READ, member)
            beat_s = self._heartbeat_s / 4
            looked = time.monotonic()
            # The group may have formed for longer than a heartbeat: silence counts from here.
            for member in self._members:
                member.heard = looked
            while True:
                for key, _ in selector.select(beat_s):
                    if key.data is None:
                        return
                    if key.data is forks:  # another one is ready before a worker needs it
                        selector.unregister(key.fileobj)
                        self._local.replace_forks()
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)
                # If this process itself was stopped for a while, silence means nothing.
                now, before = time.monotonic(), looked
                looked = now
                if now - before < 2 * beat_s:
                    self._notice_silence(now)

    def _read(self, member: Member) -> bool:
        """Read the records of a member; return whether its connection still stands."""
        try:
            records = member.control.receive_all()
        except TransportError as error:
            if not self.ending:
                note = "" if isinstance(error, PeerLost) else f" ({error})"
                self._fail(self.loss_of(member, note=note))
            self._note_stopped(member)
            return False
        member.heard = time.monotonic()
        for record in records:
            match record["type"]:
                case "stopped":
                    self._note_stopped(member)
                case "story":
                    member.story.put(str(record["text"]))
                case "clock":
                    member.clock.put((int(record["ns"]), time.monotonic_ns()))
                case "doing":
                    member.doing = str(record["action"])
                case "beat":
                    member.beat = record
        return True

    def _notice_silence(self, now: float) -> None:
        """Report a worker that has been silent for longer than the heartbeat."""
        for member in self._members:
            if now - member.heard > self._heartbeat_s and not member.stopped and not self.ending:
                self.silent.add(member.name)
                silent = f" (it has been silent for {now - member.heard:.1f} s)"
                self._fail(self.loss_of(member, note=silent))

    def _note_stopped(self, member: Member) -> None:
        """Note that a member computes no more, or is gone."""
        member.stopped = True
        if all(m.stopped for m in self._members):
            self._all_stopped.set()

    def loss_of(
        self, member: Member, problem: PipelineError | None = None, note: str = ""
    ) -> WorkerLost:
        """Make the error that names a lost worker, and says how it ended if that is known."""
        name = member.name
        own = name in self._local.processes
        how = self._local.ending(name) if own else self._keeper.ending(name)
        return member.lost(how, problem, note)

    def name_loss(self, error: PipelineError) -> PipelineError:
        peer = getattr(error, "peer", "")
        member = next((member for member in self._members if member.name == peer), None)
        return error if member is None else self.loss_of(member, error)

    def stories(self) -> list[str]:
        """Ask every worker what it waits for, for 2 s; the text says who does not answer."""
        tell(self._members, {"type": "story"})
        deadline = Deadline(_STORY_TIMEOUT)
        told = []
        for member in self._members:
            try:
                text = member.story.get(timeout=deadline.remaining_s())
            except queue.Empty:
                text = "its worker does not answer"
            told.append(f"{member.hosts} (worker {member.name!r}): {text}")
        return told

    def status(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {
                "name": member.name,
                "stages": member.hosts,
                "process": member.description,
                "silent_s": now - member.heard,
                "rss": int(member.beat.get("rss", 0)),
                "doing": str(member.beat.get("doing", "")),
            }
            for member in self._members
        ]

    def clocks(self) -> list[Reading]:
        return [clock_of(member) for member in self._members]

    def wait_until_stopped(self, timeout: timedelta) -> None:
        """Wait until no member computes any more, at most for the timeout."""
        if self._thread is not None:  # else nobody reads what they answer
            self._all_stopped.wait(timeout.total_seconds())

    def stop_waiting(self) -> None:
        """Have `wait_until_stopped` return at once."""
        self._all_stopped.set()

    def end(self) -> None:
        """End the thread, if it was started."""
        if self._thread is not None:
            try:
                self._wake.send(b"x")
            finally:
                self._thread.join()

    def close(self) -> None:
        """Close the sockets that wake the thread, after `end`."""
        self._wake.close()
        self._woken.close()


_TIMEOUT = timedelta(seconds=5)
"""For one worker to answer all rounds."""


_ROUNDS = 16
"""How often a clock is read; the reading with the shortest round trip counts."""


def clock_of(member: Member) -> Reading:
    """Read a worker's clock several times, and keep the reading with the shortest round trip."""
    deadline = Deadline(_TIMEOUT)
    readings = []
    for _ in range(_ROUNDS):
        sent = time.monotonic_ns()
        member.control.send({"type": "clock"})
        try:
            # Put there by the thread of `Watch`, which must be running.
            answered, received = member.clock.get(timeout=deadline.remaining_s())
        except queue.Empty:
            raise MessageTimeout(
                f"worker {member.name!r} did not say within {_TIMEOUT.total_seconds():g} s what "
                "its clock shows; is it stopped, or its machine overloaded?"
            ) from None
        readings.append(Reading(sent, answered, received))
    found = best(readings)
    # Processes of one kernel share the monotonic clock, unless a container has its own time
    # namespace: then the offset is larger than the error of the reading.
    if member.same_clock and abs(found.offset) <= found.error:
        return Reading(found.answered, found.answered, found.answered)
    return found
