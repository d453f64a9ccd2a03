"""The receiving end of the coordinator: messages, and failures of stages and workers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipedream_rt.cluster.interface import Cluster, Fail, Failure, memoized_error
from pipedream_rt.errors import NonFiniteLoss, PeerLost, PipelineError, RemoteError, StageFailed
from pipedream_rt.messages.inbox import Inbox
from pipedream_rt.messages.message import Failed, Message
from pipedream_rt.models.shipping import loads
from pipedream_rt.schedules import Plan
from pipedream_rt.telling import log_of

_log = log_of(__name__)


class CoordinatorInbox:
    """The receiver of messages and failures: messages go into the inbox, failures close it.

    The transport and the watch hold this object rather than the pipeline. So a pipeline that the
    user drops can be collected, and its workers end. Threads that receive must not wait, so they
    only put something aside; the thread that takes from the inbox makes the error of it.

    Attributes:
        inbox: The coordinator's inbox, the same in all generations.
        cluster: The workers of the present generation; None while they start.
        part: Says of a training micro-batch what part of its mini-batch it is; empty for all of it.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.inbox = Inbox("the coordinator")
        self.inbox.titles = plan.title_of
        self.cluster: Cluster | None = None
        self.part: Callable[[int], str] = lambda micro_batch: ""
        self.generation = 0
        self._failure: Failure | None = None
        self._lock = threading.Lock()

    def begin(self, generation: int) -> None:
        """Begin a generation; failures of earlier ones are ignored from now on."""
        with self._lock:
            self.generation = generation
            self._failure = self.cluster = None
            self.inbox.reopen(generation)

    @property
    def failure(self) -> BaseException | None:
        """Why the workers cannot go on: the first failure of the generation; None if they can."""
        failure = self._failure
        # To find out may take a while, so threads that receive must not ask.
        return failure() if callable(failure) else failure

    def receive(self, message: Message) -> None:
        """Put a message into the inbox, or close the inbox if it tells of a failure. Any thread."""
        payload = message.payload
        if not isinstance(payload, Failed):
            self.inbox.put(message)
            return
        self.fail_of(message.generation)(memoized_error(lambda: self.error_of(payload)))

    def fail_of(self, generation: int) -> Fail:
        """Return a function to call, from any thread, when the workers of a generation fail."""

        def fail(failure: Failure) -> None:
            with self._lock:
                # Under the lock, so that no inbox is closed that `begin` has opened anew.
                if generation == self.generation and self._failure is None:
                    self._failure = failure
                    self.inbox.close(failure)

        return fail

    def error_of(self, failed: Failed) -> BaseException:
        """Return the error to raise for a failure that a stage has sent."""
        cause = _cause_of(failed)
        # The stage only lost a connection; the cluster knows which worker ended, and how.
        if isinstance(cause, PeerLost) and self.cluster is not None:
            return self.cluster.name_loss(cause)
        cls = NonFiniteLoss if isinstance(cause, NonFiniteLoss) else StageFailed
        where = f"{self._plan.title_of(failed.address)}, {failed.action}"
        error = cls(
            f"{where}: {failed.type_name}: {failed.text}{self._part_of(failed, cause)}",
            stage=self._plan.stage_of(failed.address),
            action=failed.action,
            trace=failed.trace,
        )
        error.__cause__ = cause
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"Traceback on the worker:\n{failed.trace}")
        return error

    def _part_of(self, failed: Failed, cause: BaseException) -> str:
        """Say which part of a mini-batch the user's code had when it raised."""
        number = failed.action[1:]
        if isinstance(cause, PipelineError) or failed.action[:1] != "F" or not number.isdecimal():
            return ""
        return (part := self.part(int(number))) and f" ({part})"


def _cause_of(failed: Failed) -> BaseException:
    """Return the error that the worker raised; a `RemoteError` if it does not unpickle."""
    if failed.pickled:
        try:
            cause = loads(failed.pickled)
            if isinstance(cause, BaseException):
                return cause
        except Exception as problem:  # a foreign class may do anything when unpickled
            _log.debug("the error of a stage does not unpickle: %r", problem)
    return RemoteError(f"{failed.type_name}: {failed.text}")
