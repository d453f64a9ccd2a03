"""What arrives at the coordinator: messages, and failures of stages and workers."""

from __future__ import annotations

import logging

import cloudpickle

from pipedream_rt.cluster import Cluster
from pipedream_rt.errors import NonFiniteLoss, PeerLost, RemoteError, StageFailed
from pipedream_rt.stage.inbox import Inbox
from pipedream_rt.stage.messages import Failed, Message

_log = logging.getLogger(__name__)


class Reception:
    """What arrives at the coordinator: messages into the inbox, failures as its closing reason.

    Apart from `Pipeline`, so that a pipeline that is dropped can be collected and ends its workers.
    """

    def __init__(self, generation: int) -> None:
        """Start open."""
        self.inbox = Inbox("the coordinator", generation)
        self.cluster: Cluster | None = None
        self._generation = generation

    def receive(self, message: Message) -> None:
        """Take a message; called from any thread."""
        if not isinstance(message.payload, Failed):
            self.inbox.put(message)
        elif message.generation == self._generation:
            self.fail(self._error_of(message.sender, message.payload))

    def fail(self, error: BaseException) -> None:
        """Note why the pipeline cannot go on; the first reason stays."""
        self.inbox.close(error)

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
