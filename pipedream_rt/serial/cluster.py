"""Stages in the caller's own thread, one after another: no threads, no processes, the same bits.

Each worker's loop is a generator that yields the message it waits for. Whenever the coordinator
waits, the workers get turns: each runs until it needs a message that is not there, until none can
go on. So all work that was fed is done, as far as the order allows, before the coordinator looks
for what it waits for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipedream_rt.cluster.interface import ClusterSpec
from pipedream_rt.devices.randomness import kept_generator_state
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.inbox import Reason
from pipedream_rt.messages.message import Message
from pipedream_rt.models.preserving_state import drawing_alone
from pipedream_rt.models.settings import refuse_contexts
from pipedream_rt.serial.in_process import ClusterHere
from pipedream_rt.serial.transport import DirectTransport, ShuffledTransport
from pipedream_rt.stage.cooperative import Turns
from pipedream_rt.stage.host import StageHost


class _SerialWorker:
    """A worker: its stages and their loop. A message for it puts it into ``ready``."""

    def __init__(self, host: StageHost, ready: deque[_SerialWorker]) -> None:
        self.host = host
        self._turns = Turns(host)
        self._ready = ready

    def receive(self, message: Message) -> None:
        """Take a message, and a turn if the worker was waiting for it."""
        if self.host.inbox.put(message):
            self._want_a_turn()

    def lose(self, reason: Reason) -> None:
        """Close the inbox with a reason, which the worker finds at its next turn."""
        self.host.inbox.close(reason)
        self._want_a_turn()

    def _want_a_turn(self) -> None:
        """Enter ``ready`` once, unless the worker has ended."""
        if not self._turns.has_ended and self not in self._ready:
            self._ready.append(self)

    def take_turn(self, *, once: bool = False) -> None:
        """Go on until a message is needed that is not there; see `Turns.take`."""
        if self._turns.take(once=once) and once:
            self._want_a_turn()

    def end(self) -> None:
        """End the loop, and let go of the stages."""
        self._turns.end()


class SerialCluster(ClusterHere):
    """Every worker gets turns in the caller's thread; in tests a seed shuffles the turns."""

    def __init__(self, spec: ClusterSpec, *, shuffle_seed: int | None = None) -> None:
        self._draw = None if shuffle_seed is None else random.Random(shuffle_seed)
        self._shuffled = None if self._draw is None else ShuffledTransport(self._draw)
        self._life, self._fail = Lifecycle("the cluster"), spec.fail
        self._threads = spec.threads
        self._ready: deque[_SerialWorker] = deque()
        self._takes_turns = False
        super().__init__(spec, self._shuffled or DirectTransport())
        self._workers = [_SerialWorker(host, self._ready) for host in self._hosts]
        for worker in self._workers:
            self._open(worker.host, worker.receive, worker.lose)

    def check_settings_unchanged(self) -> None:
        """Refuse what `ClusterHere` does, and contexts of the script, which hold for stages too."""
        # Autocast cannot just be turned off for stages: inside a context of the script's it would
        # keep its copies of weights from one update to the next.
        super().check_settings_unchanged()
        refuse_contexts()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Before the coordinator waits, workers go on as far as they can."""
        # If they have turns, a signal handler is closing the pipeline while a stage computes.
        if not self._takes_turns:
            self._takes_turns = True
            try:
                self.check_settings_unchanged()
                with _as_on_a_worker(self._threads):
                    self._go_on_while_open()
            finally:
                self._takes_turns = False
                if not self._life.is_open:
                    self._end()
        yield

    def _go_on_while_open(self) -> None:
        """Give turns until no worker can go on."""
        try:
            while self._life.is_open and self._go_on():
                pass
        except Exception as error:  # of a signal handler: a stage was left in the middle
            self._fail(error)
            raise

    def _go_on(self) -> bool:
        """Give a worker its turn, or deliver a message; return whether there was any."""
        if self._draw is None or self._shuffled is None:
            if self._ready:
                self._ready.popleft().take_turn()
                return True
            return False
        pending = self._shuffled.pending
        if pending and (not self._ready or self._draw.random() < 0.5):
            self._shuffled.deliver_one()
        elif self._ready:
            self._ready.rotate(self._draw.randrange(len(self._ready)))
            self._ready.popleft().take_turn(once=self._draw.random() < 0.5)
        else:
            return False
        return True

    def close(self) -> None:
        if not self._life.begin_closing():
            return
        if not self._takes_turns:  # a generator that runs cannot be closed
            self._end()
        self._life.close()

    def kill(self) -> None:
        self.close()

    def _end(self) -> None:
        """End all workers; `waiting` calls it if `close` came while one had its turn."""
        for worker in self._workers:
            worker.end()
        self.transport.close()


@contextmanager
def _as_on_a_worker(threads: int) -> Iterator[None]:
    """Run the body with the modes of autograd, the random state and the threads of a worker."""
    # Workers wait for nothing within their turns, so other threads of the script get theirs.
    with (
        drawing_alone(), kept_generator_state(), torch.inference_mode(False), torch.enable_grad()
    ):  # fmt: skip
        before = torch.get_num_threads()
        if threads != before:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            if threads != before:
                torch.set_num_threads(before)
