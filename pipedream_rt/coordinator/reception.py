"""What arrives at the coordinator: messages, and failures of stages and workers."""

from __future__ import annotations

import logging
import threading

import cloudpickle

from pipedream_rt.cluster.base import Cluster, Fail
from pipedream_rt.errors import NonFiniteLoss, PeerLost, RemoteError, StageFailed
from pipedream_rt.messages.inbox import Inbox
from pipedream_rt.messages.message import Failed, Message

_log = logging.getLogger(__name__)


class Reception:
    """What arrives at the coordinator: messages into the inbox, failures as its closing reason.

    Attributes:
        inbox: The same in all generations of workers.
        cluster: The workers of now.
        generation: Theirs.
        failure: Why they cannot go on, if so; the first reason stays.

    Apart from `Pipeline`, so that a pipeline that is dropped can be collected and ends its workers.
    """

    def __init__(self) -> None:
        """Belong to no generation yet."""
        self.inbox = Inbox("the coordinator")
        self.cluster: Cluster | None = None
        self.generation = 0
        self.failure: BaseException | None = None
        self._lock = threading.Lock()

    def begin(self, generation: int) -> None:
        """Belong to a new generation of workers; failures of those before are no news."""
        with self._lock:
            self.generation = generation
            self.failure = self.cluster = None
            self.inbox.reopen(generation)

    def receive(self, message: Message) -> None:
        """Take a message; called from any thread."""
        if not isinstance(message.payload, Failed):
            self.inbox.put(message)
        else:
            error = self._error_of(message.sender, message.payload)
            self.fail_of(message.generation)(error)

    def fail_of(self, generation: int) -> Fail:
        """Return what is told that the workers of a generation cannot go on; from any thread."""

        def fail(error: BaseException) -> None:
            with self._lock:
                if generation == self.generation and self.failure is None:
                    self.failure = error
                    self.inbox.close(error)

        return fail

    def _error_of(self, stage: int, failed: Failed) -> BaseException:
        """Make the error that the caller gets of a failure that was sent as data."""
        cause = _cause_of(failed)
        if isinstance(cause, PeerLost) and self.cluster is not None:
            return self.cluster.name_loss(cause)
        cls = NonFiniteLoss if isinstance(cause, NonFiniteLoss) else StageFailed
        error = cls(
            f"stage {stage}, {failed.action}: {failed.type_name}: {failed.text}",
            stage=stage,
            action=failed.action,
            trace=failed.trace,
        )
        error.__cause__ = cause
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"Traceback on the worker:\n{failed.trace}")
        return error


def _cause_of(failed: Failed) -> BaseException:
    """The remote error itself, with its own type, or a stand-in."""
    if failed.pickled:
        try:
            cause = cloudpickle.loads(failed.pickled)
            if isinstance(cause, BaseException):
                return cause
        except Exception as problem:  # a foreign class may do anything when unpickled
            _log.debug("the error of a stage does not unpickle: %r", problem)
    return RemoteError(f"{failed.type_name}: {failed.text}")
