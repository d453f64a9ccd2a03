"""The receiving end of the coordinator: messages, and failures of stages and workers."""

from __future__ import annotations

import logging
import threading

import cloudpickle

from pipedream_rt.cluster.base import Cluster, Fail, Failure, once
from pipedream_rt.errors import NonFiniteLoss, PeerLost, RemoteError, StageFailed
from pipedream_rt.messages.inbox import Inbox
from pipedream_rt.messages.message import Failed, Message

_log = logging.getLogger(__name__)


class Reception:
    """What arrives at the coordinator: messages into the inbox, failures as its closing reason.

    It is apart from `Pipeline`, so that a pipeline that is dropped can be collected, which ends its
    workers. What arrives is only put somewhere: threads of the RPC pool must not wait. What a
    failure means is found out by the thread that takes from the inbox.

    Attributes:
        inbox: The same in all generations of workers.
        cluster: The workers of now.
        generation: Theirs.
    """

    def __init__(self) -> None:
        """Belong to no generation yet."""
        self.inbox = Inbox("the coordinator")
        self.cluster: Cluster | None = None
        self.generation = 0
        self._failure: Failure | None = None
        self._lock = threading.Lock()

    def begin(self, generation: int) -> None:
        """Belong to a new generation of workers; failures of those before are no news."""
        with self._lock:
            self.generation = generation
            self._failure = self.cluster = None
            self.inbox.reopen(generation)

    @property
    def failure(self) -> BaseException | None:
        """Why the workers cannot go on, if so; the first reason stays. Not from the RPC pool."""
        failure = self._failure
        return failure() if callable(failure) else failure

    def receive(self, message: Message) -> None:
        """Take a message; called from any thread."""
        payload = message.payload
        if not isinstance(payload, Failed):
            self.inbox.put(message)
            return
        self.fail_of(message.generation)(once(lambda: self._error_of(message.sender, payload)))

    def fail_of(self, generation: int) -> Fail:
        """Return what is told that the workers of a generation cannot go on; from any thread."""

        def fail(failure: Failure) -> None:
            with self._lock:
                if generation == self.generation and self._failure is None:
                    self._failure = failure
                    self.inbox.close(failure)

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
    """Return the error that the worker raised; a `RemoteError` if it does not unpickle."""
    if failed.pickled:
        try:
            cause = cloudpickle.loads(failed.pickled)
            if isinstance(cause, BaseException):
                return cause
        except Exception as problem:  # a foreign class may do anything when unpickled
            _log.debug("the error of a stage does not unpickle: %r", problem)
    return RemoteError(f"{failed.type_name}: {failed.text}")
